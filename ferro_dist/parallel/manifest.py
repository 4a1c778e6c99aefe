"""Find out whether all ranks mean the same thing, before they act on it.

A manifest is a list of lines, one for each thing that must be equal on all ranks. Comparing it
takes three small all_gathers at most:

1. A digest of the whole. Equal on all ranks: done.
2. A digest of each line, which tells the first line that differs.
3. That line, so that the error can quote what each rank has.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ferro_dist.arguments import name_group
from ferro_dist.errors import CollectiveMismatch
from ferro_dist.parallel.exchange import all_gather_rows

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["BUILD_THE_SAME", "agree_on_manifest", "explain_mismatch"]

NumpyArray = np.ndarray[Any, Any]

HEADER = np.dtype([("digest", "S32"), ("length", "u4"), ("number", "u4")])
QUOTE_NBYTES = 512
"""How much of a line travels to be quoted."""

BUILD_THE_SAME = "Build the same, in the same order, on every {member}."


def agree_on_manifest(
    lines: Sequence[str],
    backend: Backend,
    op: str,
    timeout: float | None = None,
    member: str = "rank",
    remedy: str = BUILD_THE_SAME,
) -> int:
    """Raise on every rank alike if the manifests of the ranks differ.

    Parameters
    ----------
    lines : sequence of str
        What this rank has.
    backend : Backend
    op : str
        The caller, for the error: ``"DDP"``.
    timeout : float, optional
        Seconds until the others must have called, too; None for the backend's own.
    member : str, default "rank"
        What a rank of this group is to the user, for the error: ``"replica"``.
    remedy : str
        What to do about a difference, for the error; ``{member}`` stands for `member`.

    Returns
    -------
    int
        A random number below 2**31 from rank 0, equal on all ranks: it distinguishes those that
        agreed here from any others in the same group.

    Raises
    ------
    CollectiveMismatch
        Names the first line that differs and what each rank has in its place. The
        group stays usable.
    """
    digests = np.array([_digest(line) for line in lines], np.uint64)
    digest = hashlib.sha256(digests.tobytes()).digest()
    header = np.array([(digest, len(lines), secrets.randbits(31))], HEADER)
    headers = all_gather_rows(header.view(np.uint8), backend, timeout).view(HEADER)
    if (headers["digest"] == headers["digest"][0]).all():
        return int(headers["number"][0, 0])
    index = _first_difference(digests, int(headers["length"].max()), backend)
    line = lines[index] if index < len(lines) else "nothing"
    quotes = _gather_quotes(line, backend)
    raise _mismatch(quotes, backend, op, member, remedy.format(member=member))


def explain_mismatch(
    error: CollectiveMismatch,
    lines: Sequence[str],
    backend: Backend,
    op: str,
    num_under_way: int,
    remedy: str = BUILD_THE_SAME,
) -> CollectiveMismatch:
    """Bring all ranks together again; return the error that says how their manifests differ.

    Called by all ranks, each of which has had a mismatch and waited for its own calls.

    Parameters
    ----------
    error : CollectiveMismatch
        Returned if the manifests do not differ, or if it already says how.
    lines, backend, op
        As `agree_on_manifest` takes them.
    num_under_way : int
        The most calls that another rank may have under way.
    remedy : str
        As `agree_on_manifest` takes it.
    """
    if error.op == op:
        return error
    # Each of those calls is answered by a failing call of this rank.
    for _ in range(num_under_way + 1):
        answer = _disagreement(lines, backend, op, remedy)
        if answer is None or answer.op == op:
            return answer or error
    return error


def _disagreement(
    lines: Sequence[str], backend: Backend, op: str, remedy: str
) -> CollectiveMismatch | None:
    try:
        agree_on_manifest(lines, backend, op, timeout=backend.timeout / 10, remedy=remedy)
    except CollectiveMismatch as error:
        return error.with_traceback(None)  # which would refer to the caller, and so to the error
    return None


def _first_difference(digests: NumpyArray, length: int, backend: Backend) -> int:
    """Index of the first line that is not the same on all ranks."""
    padded = np.zeros(length, np.uint64)
    padded[: digests.size] = digests
    of_ranks = all_gather_rows(padded, backend)
    return int((of_ranks != of_ranks[0]).any(axis=0).argmax())


def _gather_quotes(line: str, backend: Backend) -> list[str]:
    quote = line.encode()
    if len(quote) > QUOTE_NBYTES:
        # The digest distinguishes lines that differ only in what is cut off.
        quote = quote[: QUOTE_NBYTES - 30] + f"... (digest {_digest(line):x})".encode()
    rows = all_gather_rows(np.frombuffer(quote.ljust(QUOTE_NBYTES, b"\0"), np.uint8), backend)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def _mismatch(
    quotes: Sequence[str], backend: Backend, op: str, member: str, remedy: str
) -> CollectiveMismatch:
    ranks_of: dict[str, list[int]] = {}
    for rank, quote in enumerate(quotes):
        ranks_of.setdefault(quote, []).append(rank)
    sides = "; ".join(f"{quote} on {_name(ranks, member)}" for quote, ranks in ranks_of.items())
    error = CollectiveMismatch(
        f"{op}: the {member}s disagree. First difference: {sides}.\n{remedy}",
        op=op,
        rank=backend.rank,
        peer=_odd_one_out(list(ranks_of.values())),
    )
    name_group(error, backend)
    return error


def _odd_one_out(sides: Sequence[Sequence[int]]) -> int | None:
    """Return the rank that stands alone against several that agree, if there is one."""
    if len(sides) != 2:
        return None
    minority, majority = sorted(sides, key=len)
    return minority[0] if len(minority) == 1 < len(majority) else None


def _name(ranks: Sequence[int], member: str) -> str:
    return f"{member}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _digest(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "little")
