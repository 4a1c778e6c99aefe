"""What ranks say to each other while they connect: frames, lists of byte strings, errors.

A frame is a kind (1 byte), a length (4 bytes, big endian) and a body. Every length
is checked before memory is taken for it; bodies hold numbers, text and lists of
them, never code.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Generator, Sequence
from typing import Any

from ferro_dist import errors

__all__ = [
    "MAX_CONTRIBUTION_NBYTES",
    "MAX_MISSING",
    "Conversation",
    "FrameKind",
    "ProtocolError",
    "decode_error",
    "decode_json",
    "encode_error",
    "encode_frame",
    "max_gathered_nbytes",
    "pack_list",
    "read_frame",
    "unpack_list",
]

Conversation = Generator[int | bytes, bytes, Any]
"""One side of a dialogue: yields bytes to send, or the number of bytes it needs next."""

FRAME = struct.Struct("!BI")
LENGTH = struct.Struct("!I")
MAX_CONTRIBUTION_NBYTES = 16 * 1024
# The text of an error and its missing ranks: together they fit into a contribution, whatever the
# characters.
MAX_MESSAGE_LENGTH = 1500
MAX_MISSING = 512


class ProtocolError(Exception):
    """Bytes that the protocol does not allow."""


class FrameKind(enum.IntEnum):
    """What a frame carries."""

    CONTRIBUTION = 1  # one rank's part of an all_gather
    GATHERED = 2  # the parts of all ranks
    FAILURE = 3  # an error that ends the rendezvous
    MEMBERS = 4  # which ranks of a group go on


def encode_frame(kind: FrameKind, body: bytes) -> bytes:
    """Return a frame as it goes over the wire."""
    return FRAME.pack(kind, len(body)) + body


def read_frame(limit: int) -> Generator[int | bytes, bytes, tuple[FrameKind, bytes]]:
    """Read one frame whose body has at most `limit` bytes."""
    kind, length = FRAME.unpack((yield FRAME.size))
    if kind not in FrameKind.__members__.values():
        raise ProtocolError(f"a frame of unknown kind {kind}")
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes where {limit} are allowed")
    body = yield length
    return FrameKind(kind), body


def max_gathered_nbytes(world_size: int) -> int:
    """Return the largest body that a GATHERED frame of a group may have."""
    return world_size * (LENGTH.size + MAX_CONTRIBUTION_NBYTES)


def pack_list(parts: Sequence[bytes]) -> bytes:
    """Join byte strings so that `unpack_list` finds them again."""
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


def unpack_list(body: bytes, count: int) -> list[bytes]:
    """Split what `pack_list` joined; exactly `count` parts and nothing after them."""
    parts, at = [], 0
    for _ in range(count):
        if len(body) - at < LENGTH.size:
            raise ProtocolError("a list that is cut short")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if length > len(body) - at:
            raise ProtocolError(f"a part of {length} bytes where {len(body) - at} are left")
        parts.append(body[at : at + length])
        at += length
    if at != len(body):
        raise ProtocolError(f"{len(body) - at} bytes behind a list")
    return parts


def decode_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; the caller checks the types of its fields."""
    try:
        value = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from None
    if type(value) is not dict:
        raise ProtocolError("JSON that is no object")
    return value


# Errors travel to other ranks as a class from this closed list, a text and numbers.
ERRORS: dict[str, type[errors.DistributedError]] = {
    error.__name__: error
    for error in (
        errors.BackendUnavailable,
        errors.CollectiveMismatch,
        errors.InvalidRank,
        errors.InvalidWorldSize,
        errors.Io,
        errors.LockPoisoned,
        errors.NoConnection,
        errors.PeerLostError,
        errors.Timeout,
    )
}


def encode_error(error: errors.DistributedError) -> bytes:
    """Return an error as the body of a FAILURE frame."""
    name = type(error).__name__
    facts: dict[str, Any] = {
        "class": name if name in ERRORS else "Io",
        "message": str(error)[:MAX_MESSAGE_LENGTH],
        "peer": error.peer,
    }
    if isinstance(error, errors.Timeout):
        facts["seconds"] = float(error.seconds)
        facts["missing"] = list(error.missing[:MAX_MISSING])
    return json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace")


def decode_error(body: bytes, rank: int) -> errors.DistributedError:
    """Return the error of a FAILURE frame, as this rank raises it."""
    facts = decode_json(body)
    error_class = ERRORS.get(str(facts.get("class")))
    message, peer = facts.get("message"), facts.get("peer")
    if error_class is None or type(message) is not str or not _is_rank(peer, optional=True):
        raise ProtocolError("a malformed error")
    if error_class is not errors.Timeout:
        return error_class(message, op="init", rank=rank, peer=peer)
    seconds, missing = facts.get("seconds"), facts.get("missing")
    if type(seconds) is not float or type(missing) is not list or len(missing) > MAX_MISSING:
        raise ProtocolError("a malformed timeout")
    if not all(_is_rank(item) for item in missing):
        raise ProtocolError("a timeout of ranks that are none")
    return errors.Timeout(
        message, op="init", rank=rank, peer=peer, seconds=seconds, missing=missing
    )


def _is_rank(value: object, *, optional: bool = False) -> bool:
    return (optional and value is None) or (type(value) is int and value >= 0)
