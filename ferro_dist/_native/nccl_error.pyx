# csrc/nccl throws facts; this puts them into words. See native_error.pyx for the engine's.

from libcpp.string cimport string

from ferro_dist._native.cuda_runtime cimport raise_cuda
from ferro_dist._native.libnccl cimport (
    current_error, Error, ErrorKind, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError,
    ncclTimeout,
)

from ferro_dist.errors import (
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    Io,
    LockPoisoned,
    PeerLostError,
    Timeout,
)

__all__: list[str] = []

# NCCL's name for a call, and ours.
cdef dict OPS = {
    "ncclAllReduce": "allreduce", "ncclBroadcast": "broadcast", "ncclReduce": "reduce",
    "ncclAllGather": "all_gather", "ncclReduceScatter": "reduce_scatter",
    "ncclAlltoAll": "all_to_all", "ncclGather": "gather", "ncclScatter": "scatter",
    "ncclSend": "send", "ncclRecv": "recv", "ncclGroupEnd": "group",
    "ncclCommInitRankConfig": "init", "ncclCommInitRankScalable": "init",
    "ncclCommSplit": "split", "ncclCommShrink": "shrink", "ncclCommGrow": "grow",
}


cdef extern from "Python.h":
    void* PyErr_Occurred() noexcept

cdef extern from "interpreter_lock.hpp" namespace "ferro::python":
    void begin_interpreter_exit "ferro::python::InterpreterExit::begin"() noexcept
    void wait_at_exit() noexcept


cdef void begin_exit() noexcept:
    begin_interpreter_exit()


cdef int raise_nccl() except -1:
    wait_at_exit()
    if PyErr_Occurred() != NULL:
        return -1  # raised by a signal handler while the call waited
    cdef Error error = current_error()
    function = (<bytes> error.function).decode()
    if error.kind == ErrorKind.cuda:
        raise_cuda(error.result, function)
    raise _exception_of(error, function, OPS.get(function))


cdef object _exception_of(const Error& error, str function, op):
    if error.kind == ErrorKind.out_of_memory:
        return MemoryError()
    if error.kind == ErrorKind.timeout:
        return _timeout(error, function, op)
    if error.kind == ErrorKind.too_old:
        return BackendUnavailable(
            f"{function} came with NCCL {_text(error.detail)}, and this process has loaded an older "
            "one.\nUpgrade nvidia-nccl-cu12 or nvidia-nccl-cu13; if torch is imported, its NCCL is "
            "the one that counts.", op=op)
    if error.kind == ErrorKind.peer_lost:
        return PeerLostError(
            f"Rank {error.result} died, or its host does not answer.", peer=error.result, op=op)
    if error.kind == ErrorKind.peer_left:
        return ChannelClosed(
            f"Rank {error.result} has ended the group on the host's side.", peer=error.result, op=op)
    if error.kind == ErrorKind.deserted:
        return ChannelClosed(
            f"{function} cannot be done: rank {error.result} has left the group without making the call.",
            peer=error.result, op=op)
    if error.kind == ErrorKind.system:
        return Io(error.result, f"{function}: {_text(error.detail)}")
    if error.kind == ErrorKind.aborted:
        return ChannelClosed("This rank has aborted the communicator, or its calls.", op=op)
    if error.kind == ErrorKind.closed:
        return ChannelClosed("This rank has closed the communicator.", op=op)
    if error.kind == ErrorKind.interrupted:
        return DistributedError("A call of this communicator was interrupted.", op=op)
    if error.kind == ErrorKind.forked:
        return LockPoisoned(
            "This process was forked from one that uses NCCL: neither its communicators nor CUDA "
            "work here. Start the child with the spawn method, and make a group there.", op=op)
    return _nccl_error(
        error.result, (<bytes> error.meaning).decode(), _text(error.detail).strip(), function, op)


cdef object _timeout(const Error& error, str function, op):
    if function == "ncclCommDestroy":
        return Timeout(
            f"NCCL has not freed the communicator after {error.elapsed_s:.1f} s. It waits for CUDA graphs "
            "that captured calls of it: delete them first. Calls are refused already.",
            seconds=error.elapsed_s, op=op)
    return Timeout(
        f"{function} was not done after {error.elapsed_s:.1f} s: {_reason(error)}\nCheck that all ranks "
        "make the same call and that NCCL_SOCKET_IFNAME names a network that connects them; "
        "NCCL_DEBUG=INFO says more.", seconds=error.elapsed_s, missing=tuple(error.missing), op=op)


cdef str _reason(const Error& error):
    if not error.is_attended:
        return "other ranks are missing, or cannot be reached. NCCL does not tell which."
    if error.missing.empty():
        return "no rank of this host is missing."
    return f"{who_is_missing(tuple(error.missing))}."


cdef str who_is_missing(tuple missing):
    ranks = ", ".join(map(str, missing))
    if len(missing) == 1:
        return f"rank {ranks} has not made the call"
    return f"ranks {ranks} have not made the call"


cdef object _nccl_error(int result, str meaning, str detail, str function, op):
    reason = f"{meaning}: {detail}" if detail else meaning
    if result == <int> ncclTimeout:
        return Timeout(f"{function} failed: {reason}.", op=op)
    if result == <int> ncclRemoteError:
        return PeerLostError(f"{function} failed: a rank died or cannot be reached ({reason}).", op=op)
    if result == <int> ncclInvalidArgument or result == <int> ncclInvalidUsage:
        return DistributedError(f"{function} failed: {reason}.", op=op)
    return Io(f"{function} failed: {reason}.", op=op)  # NCCL's own words name NCCL_DEBUG=INFO


cdef str _text(const string& text):
    return text.c_str()[:text.size()].decode("utf-8", "replace")
