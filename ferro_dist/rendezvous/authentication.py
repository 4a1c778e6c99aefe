"""The shared token, and the proof that both ends of a connection know it.

The dialler sends a hello of 64 bytes; the acceptor answers with its proof, gets the dialler's, and
acknowledges::

    dialler                                       acceptor
    hello: role, rank, world size, group, nonce →
                                                ← nonce, HMAC(token, "acceptor", all said)
    HMAC(token, "dialler", all said)            →
                                                ← acknowledgement, or refusal

"All said" is the hello, the rank of the acceptor and its nonce, so that a proof is good for one
connection, direction, purpose and pair of ranks. The acceptor proves itself first, so that an
impostor waiting at the port learns nothing. One who knows the token but comes for another group is
refused. Connections are authenticated, not encrypted.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hmac
import math
import os
import select
import stat
import struct
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from ferro_dist.errors import NoConnection
from ferro_dist.rendezvous.address import digest_of
from ferro_dist.rendezvous.frame import ProtocolError

__all__ = [
    "HOW_TO_SET_A_TOKEN",
    "AuthenticationFailed",
    "Claim",
    "Role",
    "answer",
    "find_token",
    "group_digest",
    "introduce",
    "token_source",
]

MAGIC = b"FRRO"
VERSION = 1
HELLO = struct.Struct("!4sHBxII16s32s")  # magic, version, role, rank, world size, group, nonce
CHALLENGE = struct.Struct("!4sH2x32s32s")  # magic, version, nonce, proof
PROOF_NBYTES = 32
NONCE_NBYTES = 32
ACKNOWLEDGEMENT = b"\x06"
REFUSAL = b"\x15"

TOKEN_VARIABLE = "FERRO_DIST_TOKEN"
TOKEN_FD_VARIABLE = "FERRO_DIST_TOKEN_FD"
MAX_TOKEN_NBYTES = 4096
LONGEST_POLL_S = 3600.0  # poll() takes no infinite timeout
HOW_TO_SET_A_TOKEN = (
    f"set {TOKEN_VARIABLE} to the same secret on every rank, for instance the output of "
    "python3 -c 'import secrets; print(secrets.token_hex())'"
)


class AuthenticationFailed(ProtocolError):
    """The other end speaks the protocol, but another version, or does not know the token."""


class Role(enum.IntEnum):
    """What a connection is for."""

    CONTROL = 1  # to rank 0 of a group in the making, or who decides on its members
    SEGMENT = 2  # to the lowest rank of the host, for the shared memory
    COLLECTIVE = 3
    POINT_TO_POINT = 4


@dataclass(frozen=True)
class Claim:
    """Who dialled, and for what purpose."""

    role: Role
    rank: int
    world_size: int
    group_id: bytes

    def hello(self, nonce: bytes) -> bytes:
        """Return the first message of this claim."""
        facts = (self.role, self.rank, self.world_size, self.group_id)
        return HELLO.pack(MAGIC, VERSION, *facts, nonce)


def group_digest(*parts: object) -> bytes:
    """Return the 16 bytes that identify a group, its epoch and one attempt to wire it."""
    return digest_of(*parts)[:16]


def introduce(
    token: bytes, claim: Claim, acceptor_rank: int, before_proof: Callable[[], None]
) -> Generator[int | bytes, bytes, None]:
    """Hold the dialler's side of the handshake.

    Parameters
    ----------
    token : bytes
    claim : Claim
    acceptor_rank : int
        The rank that must be at the other end.
    before_proof : callable
        Called when the acceptor has proved itself; may raise ProtocolError to leave.

    Raises
    ------
    AuthenticationFailed, ProtocolError
        The acceptor does not know the token, or does not speak this protocol.
    """
    hello = claim.hello(os.urandom(NONCE_NBYTES))
    yield hello
    magic, version, nonce, proof = CHALLENGE.unpack((yield CHALLENGE.size))
    if magic != MAGIC:
        raise ProtocolError("what listens there is not ferro_dist")
    if version != VERSION:
        raise AuthenticationFailed(_describe_versions("it", version))
    if not hmac.compare_digest(proof, _prove(token, b"acceptor", hello, acceptor_rank, nonce)):
        raise AuthenticationFailed("authentication failed: its token is not this rank's")
    before_proof()
    yield _prove(token, b"dialler", hello, acceptor_rank, nonce)
    verdict = yield len(ACKNOWLEDGEMENT)
    if verdict != ACKNOWLEDGEMENT:
        raise ProtocolError("what listens there belongs to another group of this token")


def answer(token: bytes, rank: int, group_id: bytes) -> Generator[int | bytes, bytes, Claim]:
    """Hold the acceptor's side of the handshake, as `rank`; return who dialled.

    The caller must close the connection if the claim's `group_id` is another: it has been
    refused.

    Raises
    ------
    AuthenticationFailed, ProtocolError
        The dialler does not know the token, or does not speak this protocol.
    """
    hello = yield HELLO.size
    magic, version, *_ = HELLO.unpack(hello)
    if magic == MAGIC and version != VERSION:
        yield CHALLENGE.pack(MAGIC, VERSION, bytes(NONCE_NBYTES), bytes(PROOF_NBYTES))
        raise ProtocolError(_describe_versions("an alleged rank", version))
    claim = _parse_hello(hello)
    nonce = os.urandom(NONCE_NBYTES)
    yield CHALLENGE.pack(MAGIC, VERSION, nonce, _prove(token, b"acceptor", hello, rank, nonce))
    proof = yield PROOF_NBYTES
    if not hmac.compare_digest(proof, _prove(token, b"dialler", hello, rank, nonce)):
        raise AuthenticationFailed(f"an alleged rank {claim.rank} does not know the token")
    yield ACKNOWLEDGEMENT if claim.group_id == group_id else REFUSAL
    return claim


def _parse_hello(hello: bytes) -> Claim:
    magic, _, role, rank, world_size, group_id, _ = HELLO.unpack(hello)
    if magic != MAGIC:
        raise ProtocolError("what dialled is not ferro_dist")
    if role not in Role.__members__.values() or rank >= world_size:
        raise ProtocolError("a hello that says nothing sensible")
    return Claim(Role(role), rank, world_size, group_id)


def _describe_versions(who: str, version: int) -> str:
    return (
        f"{who} speaks version {version} of the protocol, this rank version {VERSION}: "
        "install the same ferro_dist for all"
    )


def _prove(token: bytes, side: bytes, hello: bytes, acceptor_rank: int, nonce: bytes) -> bytes:
    said = b"ferro %s %b%b%b" % (side, hello, acceptor_rank.to_bytes(4, "big"), nonce)
    return hmac.digest(token, said, "sha256")


# The token


def token_source(environ: Mapping[str, str]) -> str:
    """Say where `find_token` looks: the name of a variable, or ``"file"``."""
    for variable in (TOKEN_VARIABLE, TOKEN_FD_VARIABLE):
        if variable in environ:
            return variable
    return "file"


def find_token(
    token: bytes | str | None, environ: Mapping[str, str], until: float = math.inf
) -> tuple[bytes, bool]:
    """Find the token in the argument, the environment, else in this user's file.

    Parameters
    ----------
    token : bytes or str or None
    environ : mapping
    until : float, optional
        When to give up reading a descriptor, on the clock of `time.monotonic`.

    Returns
    -------
    token : bytes
    is_shared : bool
        False for the file: other machines and users do not have it.

    Raises
    ------
    NoConnection
        The token is empty or cannot be read.
    TypeError
        `token` is neither bytes nor str.
    """
    if token is not None:
        return _checked(_encoded(token), "token"), True
    source = token_source(environ)
    if source == TOKEN_VARIABLE:
        return _checked(os.fsencode(environ[source]), source), True
    if source == TOKEN_FD_VARIABLE:
        return _checked(_token_of_fd(environ[source], until), source), True
    return _token_of_file(_token_folder(environ)), False


def _encoded(token: bytes | str) -> bytes:
    if isinstance(token, str):
        return token.encode()
    try:
        return bytes(memoryview(token))  # bytes() alone would turn an int into as many zeros
    except TypeError:
        raise TypeError(f"token must be bytes or str, not {type(token).__name__}") from None


def _checked(token: bytes, source: str) -> bytes:
    token = token.strip()
    if not 0 < len(token) <= MAX_TOKEN_NBYTES:
        raise NoConnection(
            f"{source} is {'longer than 4 KiB' if token else 'empty'}: {HOW_TO_SET_A_TOKEN}"
        )
    return token


def _token_of_fd(text: str, until: float) -> bytes:
    if not (text.isascii() and text.isdigit() and len(text) < 8):
        raise NoConnection(f"{TOKEN_FD_VARIABLE}={text!r} is no file descriptor")
    fd = int(text)
    try:
        if fd not in _tokens_of_fds:
            _tokens_of_fds[fd] = _read_token_fd(fd, until)
    except NoConnection:
        raise
    except OSError as error:
        raise NoConnection(
            f"{TOKEN_FD_VARIABLE}={text} cannot be read: {error.strerror}. "
            "Descriptors reach a child process only if they are passed on"
        ) from error
    return _tokens_of_fds[fd]


# A pipe can be read once, and a process may make several groups, or try again in vain to make one.
_tokens_of_fds: dict[int, bytes] = {}
_unfinished_tokens: dict[int, bytearray] = {}  # by the pipe's inode


def _read_token_fd(fd: int, until: float) -> bytes:
    try:
        return os.pread(fd, MAX_TOKEN_NBYTES + 1, 0)
    except OSError as error:
        if error.errno != errno.ESPIPE:
            raise
    pipe = os.fstat(fd).st_ino
    token = _unfinished_tokens.setdefault(pipe, bytearray())
    while len(token) <= MAX_TOKEN_NBYTES:
        _await_readable(fd, until)
        piece = os.read(fd, MAX_TOKEN_NBYTES)
        if not piece:
            break
        token += piece
    return bytes(_unfinished_tokens.pop(pipe))


def _await_readable(fd: int, until: float) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not poller.poll(1e3 * max(0.0, min(until - time.monotonic(), LONGEST_POLL_S))):
        if time.monotonic() >= until:
            raise NoConnection(
                f"{TOKEN_FD_VARIABLE}={fd} came to no end in time. A pipe ends when every copy of "
                "its other descriptor is closed: close it where the token was written"
            )


def _token_folder(environ: Mapping[str, str]) -> str:
    # su or sudo may leave another user's XDG_RUNTIME_DIR behind, which must not be used.
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(runtime) and os.stat(runtime).st_uid == os.geteuid():
            return os.path.join(runtime, "ferro_dist")
    home = environ.get("HOME", "") or os.path.expanduser("~")
    if not os.path.isabs(home):  # as "~" is, where this user is not in the password database
        raise NoConnection(f"no token: this user has no home folder; {HOW_TO_SET_A_TOKEN}")
    return os.path.join(home, ".cache", "ferro_dist")


def _token_of_file(folder: str) -> bytes:
    path = os.path.join(folder, "token")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.path.lexists(path):
            _create_token(folder, path)
        token = _read_token(path)
    except NoConnection:
        raise
    except OSError as error:
        raise NoConnection(
            f"no token: {path} cannot be used: {error.strerror}; {HOW_TO_SET_A_TOKEN}"
        ) from error
    return _checked(token, path)


def _create_token(folder: str, path: str) -> None:
    draft = os.path.join(folder, f".token-{os.urandom(8).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, os.urandom(32).hex().encode())
        # A link appears whole or not at all, and never replaces what another rank has made.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(fd)
        os.unlink(draft)


def _read_token(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        is_private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
        if not is_private or status.st_uid != os.geteuid():
            raise NoConnection(
                f"{path} must be a file of this user that nobody else may read; delete it, and a "
                "new one is made"
            )
        return os.read(fd, MAX_TOKEN_NBYTES + 1)
    finally:
        os.close(fd)
