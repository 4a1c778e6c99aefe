# The engine throws facts; this puts them into words: what happened, where, and what to do.

from libc.stdint cimport uint64_t
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from ferro_dist.arguments import SEE_ITS_OUTPUT, closed_error, mismatch_error, of_group
from ferro_dist.errors import (
    ChannelClosed,
    Io,
    LockPoisoned,
    PeerLostError,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)

__all__: list[str] = []

cdef str GO_ON = "Go on in the group that shrink() makes, or make a new one."
cdef str GO_ON_WITHOUT_IT = "Go on without it in the group that shrink() makes, or make a new one."


cdef extern from "ferro/error.hpp" namespace "ferro" nogil:
    cdef enum class ErrorCode(unsigned char):
        none
        timeout
        peer_lost
        channel_closed
        mismatch
        size_mismatch
        interrupted
        io
        unsupported
        closed
        out_of_memory
        superseded
        under_way
        unreachable

    cdef cppclass Error:
        ErrorCode code
        int op
        uint64_t sequence
        int rank
        shared_ptr[const vector[int]] global_ranks
        int peer
        int reporter
        vector[int] missing
        vector[int] awaited
        bint is_deadlock
        double elapsed_s
        string detail

    Error current_error() noexcept
    const uint64_t NO_SEQUENCE "ferro::kNoSequence"


cdef extern from "ferro/types.hpp" namespace "ferro" nogil:
    cdef enum class Op(unsigned char):
        pass
    const char* name_of(Op op) noexcept


cdef extern from "Python.h":
    void* PyErr_Occurred() noexcept


cdef int raise_native() except -1:
    if PyErr_Occurred() != NULL:
        return -1  # raised by a signal handler while the engine waited
    cdef Error error = current_error()
    raise _exception_of(error)


cdef object _exception_of(const Error& error):
    if error.code == ErrorCode.out_of_memory and error.peer in (-1, error.rank):
        return MemoryError(_text(error.detail))
    # Without a rank it was no call that failed, or one that had not begun: `op` means nothing.
    cdef bint is_of_call = error.rank >= 0
    cdef dict facts = {
        "op": (<bytes> name_of(<Op> error.op)).decode() if is_of_call else None,
        "rank": error.rank if is_of_call else None,
        "peer": error.peer if error.peer >= 0 else None,
        "sequence": error.sequence if is_of_call and error.sequence != NO_SEQUENCE else None,
        "global_ranks": None if error.global_ranks.get() == NULL else tuple(error.global_ranks.get()[0]),
    }
    if error.code == ErrorCode.under_way:
        return _under_way(error, facts)
    cdef str where = _where(facts)
    if error.code == ErrorCode.timeout:
        return _timeout(error, where, facts)
    if error.code == ErrorCode.peer_lost:
        return PeerLostError(f"{where}: rank {error.peer} died.\n{GO_ON_WITHOUT_IT}", **facts)
    if error.code == ErrorCode.unreachable:
        return PeerLostError(
            f"{where}: the host of rank {error.peer} does not answer.\n{GO_ON_WITHOUT_IT}", **facts)
    if error.code == ErrorCode.channel_closed:
        return ChannelClosed(
            f"{where}: rank {error.peer} left the group.{_reported_by(error)}\n"
            f"{SEE_ITS_OUTPUT}{GO_ON_WITHOUT_IT}", **facts)
    if error.code == ErrorCode.superseded:
        return LockPoisoned(
            f"{where}: rank {error.peer} went on in the group that shrink() made, without this rank.\n"
            "Make a new group.", **facts)
    if error.code == ErrorCode.interrupted:
        return ChannelClosed(
            f"{where}: rank {error.peer} was interrupted by an exception inside a call of this group.\n"
            f"{SEE_ITS_OUTPUT}{GO_ON}", **facts)
    if error.code == ErrorCode.out_of_memory:
        return ChannelClosed(
            f"{where}: rank {error.peer} ran out of memory inside a call of this group.\n{GO_ON}", **facts)
    if error.code == ErrorCode.closed:
        return closed_error(**facts)
    if error.code == ErrorCode.mismatch:
        return mismatch_error(where, _text(error.detail), **facts)
    if error.code == ErrorCode.size_mismatch:
        return SizeMismatch(
            f"{where}: {_text(error.detail)}.\nThe message was dropped; the group is still usable.", **facts)
    if error.code == ErrorCode.unsupported:
        return UnsupportedOp(f"{where}: {_text(error.detail)}.", **facts)
    # Without a rank there is no group yet from which to go on.
    cdef str remedy = "" if facts["rank"] is None else f"\n{GO_ON}"
    return Io(
        f"{where}: {_text(error.detail) or 'a system call failed'}.{_reported_by(error)}{remedy}", **facts)


cdef object _timeout(const Error& error, str where, dict facts):
    cdef tuple missing = tuple(error.missing)
    if not missing and error.peer >= 0:
        missing = (error.peer,)
    what, remedy = _what_and_remedy(error, facts["op"], missing)
    return Timeout(
        f"{where}: {what}.\n{remedy}",
        missing=missing, seconds=error.elapsed_s, **facts)


cdef tuple _what_and_remedy(const Error& error, str op, tuple missing):
    cdef str names = _names(missing, error.rank)
    cdef str remedy = _remedy(names, len(missing))
    if error.is_deadlock:
        return (
            f"deadlock: {names} wait for each other",
            "Change the order of their calls: where two send to each other, let one receive first, "
            "or use sendrecv().",
        )
    if error.reporter >= 0 and error.reporter != error.rank:
        if error.reporter not in missing:
            return f"rank {error.reporter} gave up waiting for {names}", remedy
        return (  # it was waiting in a call of another kind
            f"{_silence(op, names, error.elapsed_s)}; "
            f"rank {error.reporter} gave up waiting in another call",
            remedy,
        )
    if not error.detail.empty():  # it has not had its turn, and waited for no other rank
        return _text(error.detail), "Let that call end first, or pass a larger timeout."
    if missing in ((), (error.rank,)):
        # Its own work took long, or a call before it is waiting.
        return (
            "its time was up, though it waited for no other rank itself",
            "Pass a larger timeout, or find out whom the calls before it wait for.",
        )
    if error.reporter == error.rank:
        return f"another call of this rank gave up waiting for {names}", remedy
    return _silence(op, _awaited(error, missing, names), error.elapsed_s), remedy


cdef str _awaited(const Error& error, tuple missing, str names):
    """Return whom this rank awaited: the missing, or those that the missing hold up."""
    cdef tuple awaited = tuple(error.awaited)
    if not awaited or set(awaited) & set(missing):
        return names
    holds = "holds" if len(missing) == 1 else "hold"
    return f"{_ranks(awaited)}, which {names} {holds} up,"


cdef object _under_way(const Error& error, dict facts):
    cdef tuple missing = tuple(error.missing)
    cdef str waiting = f", waiting for {_ranks(missing)}" if missing else ""
    return Timeout(
        f"{_call(facts)} is still under way on {_here(facts)} after {error.elapsed_s:g} s{waiting}.\n"
        "It goes on; wait again.",
        missing=missing, seconds=error.elapsed_s, **facts)


cdef str _remedy(str names, size_t num_missing):
    if names == "this rank":
        return (
            "Check that it makes the same calls as the others; give them a larger timeout if it is only slow."
        )
    if num_missing == 1:
        subject, verbs, pronoun = names, ("is", "makes"), "it is"
    else:
        subject, verbs, pronoun = names if num_missing else "all ranks", ("are", "make"), "they are"
    return (
        f"Check that {subject} {verbs[0]} running and {verbs[1]} the same calls; "
        f"pass a larger timeout if {pronoun} only slow."
    )


cdef str _silence(str op, str names, double elapsed_s):
    if op == "send":
        return f"{names} took no data for {elapsed_s:.1f} s"
    return f"no data from {names} for {elapsed_s:.1f} s"


cdef str _where(dict facts):
    if facts["rank"] is None:
        return "The group"
    return f"{_call(facts)} failed on {_here(facts)}"


cdef str _here(dict facts):
    return f"rank {facts['rank']}{of_group(facts['global_ranks'])}"


cdef str _call(dict facts):
    return facts["op"] if facts["sequence"] is None else f"{facts['op']} #{facts['sequence']}"


cdef str _reported_by(const Error& error):
    if error.reporter < 0 or error.reporter == error.rank or error.reporter == error.peer:
        return ""
    return f" Reported by rank {error.reporter}."


cdef str _names(tuple missing, int own_rank):
    if not missing:
        return "the group"
    return "this rank" if missing == (own_rank,) else _ranks(missing)


cdef str _ranks(tuple ranks):
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *most, last = ranks
    return f"ranks {', '.join([str(rank) for rank in most])} and {last}"


cdef str _text(const string& text):
    return text.c_str()[:text.size()].decode("utf-8", "replace")
