# NCCL as Python sees it: check, convert, let go of the GIL, call once, translate.
#
# Who may call a communicator when, and how it ends, is in csrc/nccl/communicator.hpp.
# This is the binding: operations go on the stream that the caller names, and the
# caller keeps arrays alive. Order and lifetime are nccl_group.pyx's.

import atexit
import copy
import os
import sys

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy, memset
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport shared_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

from ferro_dist._native cimport libnccl
from ferro_dist._native.buffer_view cimport BufferView, is_output, output_view_of, overlap, view_of
from ferro_dist._native.cuda_runtime cimport cudart
from ferro_dist._native.cuda_stream cimport known_stream, KnownStream, stream_handle, streams_of_thread
from ferro_dist._native.libcudart cimport Cudart, cudaStream_t
from ferro_dist._native.libnccl cimport (
    Alarm, current_group, GroupedOperation, launch_group, Native, NativeLane, NCCL_API_MAGIC, ncclBfloat16,
    ncclCommMemStat_t, ncclConfig_t, NCCL_CONFIG_UNDEF_INT, ncclDataType_t, ncclFloat16, ncclFloat32,
    ncclFloat64, ncclFloat8e4m3, ncclFloat8e5m2, ncclGetErrorString, ncclGetLastError,
    ncclGetUniqueId, ncclGetVersion, ncclInt32, ncclInt64, ncclInt8, ncclRedOp_t, ncclResult_t,
    ncclScalarHostImmediate, NCCL_SHRINK_ABORT, NCCL_SHRINK_DEFAULT, NCCL_SPLIT_NOCOLOR,
    ncclStatGpuMemPersist, ncclStatGpuMemSuspend, ncclStatGpuMemSuspended, ncclStatGpuMemTotal,
    ncclSuccess, ncclUint32, ncclUint64, ncclUint8, ncclUniqueId, NCCL_UNIQUE_ID_BYTES,
    NCCL_VERSION_CODE, NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_DEFAULT, ncclWindow_t, num_forks, Op,
    Operation, Patience,
)

import numpy

from ferro_dist import arguments
from ferro_dist._native.cuda_libraries import OLDEST_NCCL
from ferro_dist._native.cuda_runtime import compute_capability, current_device
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import (
    BackendUnavailable,
    DistributedError,
    InvalidArray,
    Io,
    LockPoisoned,
    Timeout,
    UnsupportedOp,
)
from ferro_dist.reduce_op import ReduceOp

__all__ = [
    "CONFIG_OPTIONS",
    "Communicator",
    "Group",
    "NcclMemory",
    "PreMulSum",
    "Registration",
    "UniqueId",
    "Window",
    "attendance_nbytes",
    "dtype_to_nccl",
    "get_last_error",
    "get_unique_id",
    "get_version",
    "reduce_op_to_nccl",
]

cdef Py_ssize_t NEVER_IN_PLACE = -0x7FFFFFFFFFFFFFFF
cdef int CUDA = 2  # DLPack's number
cdef int HOPPER = 90  # the compute capability, ten times
cdef double DEFAULT_TIMEOUT = 300  # seconds
cdef double ABORT_GRACE = 5  # seconds that NCCL may take to abort
cdef size_t TYPICAL_SIZE = 128  # operations of a group, which need no more memory up to there
cdef double EXIT_GRACE = 5  # seconds, for all communicators together

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept


# ---- The library ---------------------------------------------------------------------

def get_version():
    """Return the version of the NCCL that is loaded: ``(2, 27, 3)``."""
    cdef int code = 0
    CHECK_NCCL(ncclGetVersion(&code), "ncclGetVersion")
    if code < 10000:  # up to 2.8
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10000, code % 10000 // 100, code % 100


def get_unique_id():
    """Make an identifier, for one rank to give to all others of a communicator."""
    cdef UniqueId unique_id = UniqueId.__new__(UniqueId)
    cdef ncclResult_t result
    with nogil:
        result = ncclGetUniqueId(&unique_id._id)
    CHECK_NCCL(result, "ncclGetUniqueId")
    return unique_id


def get_last_error():
    """Return NCCL's own words for what went wrong last in this process, "" for nothing."""
    cdef const char* text = ncclGetLastError(NULL)
    return "" if text == NULL else text.decode("utf-8", "replace")


cdef int CHECK_NCCL(ncclResult_t result, str function) except -1:
    if result == ncclSuccess:
        return 0
    raise Io(f"{function} failed: {ncclGetErrorString(result).decode()}: {get_last_error()}.")


@cython.final
cdef class UniqueId:
    """What the ranks of one communicator share to find each other: 128 bytes.

    Parameters
    ----------
    data : bytes
        As ``bytes(unique_id)`` gives on another rank.
    """

    def __init__(self, data):
        if isinstance(data, int):
            raise TypeError(f"A unique id is made of 128 bytes, not of {data!r}.")  # not so many zeros
        cdef bytes given = bytes(data)
        if len(given) != NCCL_UNIQUE_ID_BYTES:
            raise ValueError(
                f"A unique id has {NCCL_UNIQUE_ID_BYTES} bytes, and this has {len(given)}.")
        memcpy(self._id.internal, <const char*> given, NCCL_UNIQUE_ID_BYTES)

    def __bytes__(self):
        return self._id.internal[:NCCL_UNIQUE_ID_BYTES]

    def __eq__(self, other):
        if type(other) is not UniqueId:
            return NotImplemented
        return memcmp(self._id.internal, (<UniqueId> other)._id.internal, NCCL_UNIQUE_ID_BYTES) == 0

    def __hash__(self):
        return hash(bytes(self))

    def __reduce__(self):
        return UniqueId, (bytes(self),)

    def __repr__(self):
        return f"<UniqueId {bytes(self)[:16].hex()}...>"


# ---- Dtypes and reductions -----------------------------------------------------------

# By ferro::DType: what NCCL moves in its place, how many of them an element is, and
# whether sums of them are the element's sums.
cdef struct Element:
    ncclDataType_t dtype
    int count
    bint is_number

cdef Element[17] ELEMENTS
ELEMENTS[:] = [
    Element(ncclUint8, 1, False),   # bool
    Element(ncclInt8, 1, True),
    Element(ncclUint8, 1, True),
    Element(ncclUint8, 2, False),   # int16: NCCL has none of 16 bits, and moves their bytes
    Element(ncclUint8, 2, False),   # uint16
    Element(ncclInt32, 1, True),
    Element(ncclUint32, 1, True),
    Element(ncclInt64, 1, True),
    Element(ncclUint64, 1, True),
    Element(ncclFloat16, 1, True),
    Element(ncclBfloat16, 1, True),
    Element(ncclFloat32, 1, True),
    Element(ncclFloat64, 1, True),
    Element(ncclFloat32, 2, False),  # complex64: two numbers, added and averaged each
    Element(ncclFloat64, 2, False),  # complex128
    Element(ncclFloat8e4m3, 1, True),
    Element(ncclFloat8e5m2, 1, True),
]

cdef enum DType:
    BOOLEAN = 0
    COMPLEX64 = 13
    COMPLEX128 = 14
    FLOAT8_E4M3 = 15
    FLOAT8_E5M2 = 16

# By ReduceOp, in its order.
cdef enum Reduction:
    SUM
    MEAN
    PROD
    MIN
    MAX

cdef ncclRedOp_t[5] REDUCE_OPS
REDUCE_OPS[:] = [
    libnccl.ncclSum, libnccl.ncclAvg, libnccl.ncclProd, libnccl.ncclMin, libnccl.ncclMax,
]

cdef dict CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}


def dtype_to_nccl(str dtype):
    """Return the number that NCCL gives to a dtype, for the methods that take raw pointers.

    Raises
    ------
    UnsupportedOp
        NCCL has no such dtype: bool, the 16-bit integers, complex numbers.
    """
    code = CODES.get(dtype)
    if code is None or ELEMENTS[<int> code].count != 1 or not ELEMENTS[<int> code].is_number:
        raise UnsupportedOp(f"NCCL has no dtype {dtype!r}.")
    return <int> ELEMENTS[<int> code].dtype


def reduce_op_to_nccl(op):
    """Return the number that NCCL gives to a reduction."""
    return <int> REDUCE_OPS[<int> arguments.reduce_op_of(op)]


# ---- Configuration -------------------------------------------------------------------

# Each option's place in ncclConfig_t and the first NCCL that knows of it.
cdef dict _config_fields():
    cdef ncclConfig_t c
    cdef char* start = <char*> &c
    return {
        "blocking": (<char*> &c.blocking - start, (2, 14)),
        "cga_cluster_size": (<char*> &c.cgaClusterSize - start, (2, 17)),
        "min_ctas": (<char*> &c.minCTAs - start, (2, 17)),
        "max_ctas": (<char*> &c.maxCTAs - start, (2, 17)),
        "net_name": (<char*> &c.netName - start, (2, 17)),
        "split_share": (<char*> &c.splitShare - start, (2, 18)),
        "traffic_class": (<char*> &c.trafficClass - start, (2, 26)),
        "comm_name": (<char*> &c.commName - start, (2, 27)),
        "collnet_enable": (<char*> &c.collnetEnable - start, (2, 27)),
        "cta_policy": (<char*> &c.CTAPolicy - start, (2, 27)),
        "shrink_share": (<char*> &c.shrinkShare - start, (2, 27)),
        "nvls_ctas": (<char*> &c.nvlsCTAs - start, (2, 27)),
        "n_channels_per_net_peer": (<char*> &c.nChannelsPerNetPeer - start, (2, 28)),
        "nvlink_centric_sched": (<char*> &c.nvlinkCentricSched - start, (2, 28)),
        "graph_usage_mode": (<char*> &c.graphUsageMode - start, (2, 29)),
        "num_rma_ctx": (<char*> &c.numRmaCtx - start, (2, 29)),
        "max_p2p_peers": (<char*> &c.maxP2pPeers - start, (2, 30)),
        "graph_stream_ordering": (<char*> &c.graphStreamOrdering - start, (2, 30, 7)),
        "launch_order_implicit": (<char*> &c.launchOrderImplicit - start, (2, 31)),
        "num_rma_sig": (<char*> &c.numRmaSig - start, (2, 31)),
        "rma_eager_init": (<char*> &c.rmaEagerInit - start, (2, 31)),
        "host_cft_mode": (<char*> &c.hostCftMode - start, (2, 31)),
        "nvls_host_mode": (<char*> &c.nvlsHostMode - start, (2, 31)),
    }

cdef dict CONFIG_FIELDS = _config_fields()

CONFIG_OPTIONS = tuple(CONFIG_FIELDS)


cdef ncclConfig_t _default_config() noexcept:
    cdef ncclConfig_t config
    cdef int* field = &config.blocking
    memset(&config, 0, sizeof(config))
    while <char*> field < <char*> &config + sizeof(config):
        field[0] = NCCL_CONFIG_UNDEF_INT
        field += 1
    config.netName = NULL
    config.commName = NULL
    config.size = sizeof(config)
    config.magic = NCCL_API_MAGIC
    config.version = NCCL_VERSION_CODE
    # Its calls then return at once, and we wait for them as long as the timeout says.
    config.blocking = 0
    return config


cdef ncclConfig_t _config(dict options) except *:
    """Fill in what is given; texts must live in `options` until the communicator has copied them."""
    cdef ncclConfig_t config = _default_config()
    cdef char* place
    for name, value in options.items():
        if name not in CONFIG_FIELDS:
            raise TypeError(f"There is no option {name!r}, but {', '.join(CONFIG_OPTIONS)}.")
        offset, since = CONFIG_FIELDS[name]
        _require_version(f"The option {name}", since)
        place = <char*> &config + <Py_ssize_t> offset
        if name in ("net_name", "comm_name"):
            options[name] = value.encode() if isinstance(value, str) else bytes(value)
            (<const char**> place)[0] = <const char*> options[name]
        else:
            (<int*> place)[0] = value
    return config


cdef int _require_version(str what, tuple since) except -1:
    version = get_version()
    if version < since:
        raise BackendUnavailable(
            f"{what} came with NCCL {'.'.join(map(str, since))}, and this process has loaded "
            f"{'.'.join(map(str, version))}.\nUpgrade nvidia-nccl-cu12 or nvidia-nccl-cu13.")
    return 0


# ---- Communicator --------------------------------------------------------------------

cdef cpp_bool _is_interrupted(void* unused) noexcept nogil:
    """Run Python's signal handlers in the middle of a long wait; true if one raised."""
    with gil:
        return PyErr_CheckSignals() != 0


@cython.final
cdef class Communicator:
    """One rank's place in a set of GPUs that NCCL connects.

    Made by `init_rank`, `join`, `split`, `shrink` and `grow`. All methods may be called from
    any thread; calls of one device take turns. Every blocking one takes `timeout` in
    seconds, None for the communicator's own.

    Methods whose names end in ``_raw`` take device pointers as integers, counts in
    elements, NCCL's number of the dtype (`dtype_to_nccl`) and of the reduction
    (`reduce_op_to_nccl`), and check none of it. The others take arrays, and check
    device, dtype, size, layout and overlap. Both put their work on `stream` and return; for
    arrays, None is the stream on which the arrays' library works now. **The caller keeps
    arrays alive until the stream has passed the work.**
    """

    def __init__(self):
        raise TypeError("A Communicator is made by Communicator.init_rank")

    @staticmethod
    def init_rank(
        int world_size, unique_ids, int rank, *, device=None, double timeout=DEFAULT_TIMEOUT,
        **config,
    ):
        """Connect with the other ranks, all of which make this call.

        Parameters
        ----------
        world_size : int
        unique_ids : UniqueId or sequence of UniqueId
            The same on every rank. Several spread the work of a large start
            (NCCL 2.23).
        rank : int
        device : int, optional
            The current device if not given.
        timeout : float
            Seconds, for this call and for later ones that name none.
        **config
            Options of NCCL, by the names in `CONFIG_OPTIONS`. With ``blocking=True`` NCCL
            blocks in its own calls, and timeouts cannot hold.

        Raises
        ------
        Timeout
            Not all ranks came.
        BackendUnavailable
            The NCCL that is loaded has no such option, or there is no GPU.
        """
        if not 0 <= rank < world_size:
            arguments.check_root("init", rank, rank=rank, world_size=world_size)
        cdef vector[ncclUniqueId] ids = _ids_of(unique_ids)
        cdef ncclConfig_t native_config = _config(config)
        cdef int number = current_device() if device is None else device
        cdef const Cudart* cuda = cudart()
        cdef Patience patience = Patience(timeout, _is_interrupted, NULL)
        cdef shared_ptr[Native] native
        try:
            with nogil:
                native = Native.init(cuda[0], number, ids, world_size, rank, native_config, patience)
        except BaseException as error:
            _name_rank(error, rank)
            raise
        return _wrap(native, timeout, _is_in_force(native_config.blocking))

    @staticmethod
    def join(
        int world_size, UniqueId unique_id not None, int rank, *, device=None,
        double timeout=DEFAULT_TIMEOUT, **config,
    ):
        """Become the new rank `rank` of a communicator whose ranks call `grow` now (NCCL 2.29.2)."""
        cdef ncclConfig_t native_config = _config(config)
        cdef int number = current_device() if device is None else device
        cdef const Cudart* cuda = cudart()
        cdef Patience patience = Patience(timeout, _is_interrupted, NULL)
        cdef shared_ptr[Native] native
        try:
            with nogil:
                native = Native.join(
                    cuda[0], number, unique_id._id, world_size, rank, native_config, patience)
        except BaseException as error:
            _name_rank(error, rank)
            raise
        return _wrap(native, timeout, _is_in_force(native_config.blocking))

    def __dealloc__(self):
        # The collector may run inside another group of this thread: no NCCL here.
        if self._native.get() == NULL:
            return
        if self._num_forks != num_forks():
            new shared_ptr[Native](move(self._native))  # the parent's: its locks may be held
        else:
            libnccl.end(move(self._native), EXIT_GRACE)

    def __repr__(self):
        state = ", closed" if self.is_closed else ""
        return f"<Communicator rank {self.rank} of {self.world_size} on device {self.device}{state}>"

    # ---- More communicators out of this one ------------------------------------

    def split(self, color, int key, *, timeout=None, **config):
        """Make a communicator of the ranks that name the same `color`, ordered by `key`.

        Called by all ranks. A rank that names None gets None.
        """
        cdef int native_color = NCCL_SPLIT_NOCOLOR if color is None else color
        if color is not None and native_color < 0:
            raise ValueError(f"color must not be negative, and is {color}.")
        cdef ncclConfig_t native_config = _config(config)
        cdef Patience patience = self._patience(self._seconds(timeout))
        cdef shared_ptr[Native] native
        try:
            with nogil:
                native = self._native.get().split(native_color, key, native_config, patience)
        except BaseException as error:
            self.note(error)
            raise
        if native.get() == NULL:
            return None
        return _wrap(native, self.timeout, _is_in_force(native_config.blocking))

    def shrink(self, excluded, *, bint abort=False, timeout=None, **config):
        """Make a communicator without the ranks `excluded`, called by all others (NCCL 2.27).

        With `abort`, work under way on this one is ended first.
        """
        cdef vector[int] ranks = sorted({self.root("shrink", rank) for rank in excluded})
        cdef int flags = NCCL_SHRINK_ABORT if abort else NCCL_SHRINK_DEFAULT
        cdef ncclConfig_t native_config = _config(config)
        cdef Patience patience = self._patience(self._seconds(timeout))
        cdef shared_ptr[Native] native
        try:
            with nogil:
                native = self._native.get().shrink(ranks, flags, native_config, patience)
        except BaseException as error:
            self.note(error)
            raise
        return _wrap(native, self.timeout, _is_in_force(native_config.blocking))

    def grow(self, int world_size, UniqueId unique_id=None, *, timeout=None, **config):
        """Make a communicator of `world_size` ranks, of which those from `self.world_size` on are new.

        Called by all ranks while the new ones call `join` (NCCL 2.29.2). One rank passes the
        `unique_id` that its `unique_id()` made and that the new ranks use.
        """
        cdef const ncclUniqueId* native_id = NULL
        if unique_id is not None:
            native_id = &unique_id._id
        cdef ncclConfig_t native_config = _config(config)
        cdef Patience patience = self._patience(self._seconds(timeout))
        cdef shared_ptr[Native] native
        try:
            with nogil:
                native = self._native.get().grow(world_size, native_id, native_config, patience)
        except BaseException as error:
            self.note(error)
            raise
        return _wrap(native, self.timeout, _is_in_force(native_config.blocking))

    def unique_id(self, *, timeout=None):
        """Make the identifier with which new ranks `join` when this communicator grows."""
        cdef UniqueId unique_id = UniqueId.__new__(UniqueId)
        cdef Patience patience = self._patience(self._seconds(timeout))
        try:
            with nogil:
                unique_id._id = self._native.get().unique_id(patience)
        except BaseException as error:
            self.note(error)
            raise
        return unique_id

    # ---- Its state --------------------------------------------------------------

    @property
    def is_closed(self):
        return self._native.get() == NULL or self._native.get().is_ended()

    def async_error(self):
        """Ask NCCL for the communicator's state.

        Returns
        -------
        str
            ``"no error"``, ``"operation in progress"``, or NCCL's name for an error.
        """
        cdef Patience patience = self._patience(self.timeout)
        cdef ncclResult_t result
        try:
            with nogil:
                result = self._native.get().async_error(patience)
        except BaseException as error:
            self.note(error)
            raise
        return ncclGetErrorString(result).decode()

    def last_error(self):
        """Return NCCL's words for what went wrong last, "" for nothing.

        NCCL keeps them for the process: they may be about another communicator.
        """
        self._check_own()
        return get_last_error()

    def memory_statistics(self):
        """Return the bytes of GPU memory that NCCL holds (NCCL 2.29.7).

        Returns
        -------
        dict
            ``total``, ``persistent``, ``suspendable`` in bytes, and ``is_suspended``.
        """
        return {
            "total": self._memory(ncclStatGpuMemTotal),
            "persistent": self._memory(ncclStatGpuMemPersist),
            "suspendable": self._memory(ncclStatGpuMemSuspend),
            "is_suspended": self._memory(ncclStatGpuMemSuspended) != 0,
        }

    cdef object _memory(self, ncclCommMemStat_t statistic):
        cdef Patience patience = self._patience(self.timeout)
        cdef uint64_t value
        try:
            with nogil:
                value = self._native.get().memory(statistic, patience)
        except BaseException as error:
            self.note(error)
            raise
        return value

    def suspend(self, *, timeout=None):
        """Free GPU memory that `resume` can get back; no calls in between (NCCL 2.29.7)."""
        cdef Patience patience = self._patience(self._seconds(timeout))
        try:
            with nogil:
                self._native.get().suspend(patience)
        except BaseException as error:
            self.note(error)
            raise

    def resume(self, *, timeout=None):
        """Get back what `suspend` freed."""
        cdef Patience patience = self._patience(self._seconds(timeout))
        try:
            with nogil:
                self._native.get().resume(patience)
        except BaseException as error:
            self.note(error)
            raise

    # ---- Its end ----------------------------------------------------------------

    def finalize(self, *, timeout=None):
        """Wait until all that was launched is done on all ranks; then only `close` may follow."""
        cdef Patience patience = self._patience(self._seconds(timeout))
        try:
            with nogil:
                self._native.get().finalize(patience)
        except BaseException as error:
            self.note(error)
            raise

    def revoke(self, *, timeout=None):
        """Stop what is under way; then only `split`, `shrink` and `close` may follow (NCCL 2.28.7)."""
        cdef Patience patience = self._patience(self._seconds(timeout))
        try:
            with nogil:
                self._native.get().revoke(patience)
        except BaseException as error:
            self.note(error)
            raise

    def abort(self):
        """End the communicator at once, whatever other threads and the GPU are doing with it.

        Other ranks are not told. Idempotent. Returns when NCCL is done with it, after a few
        seconds at most: CUDA graphs that captured its calls keep NCCL from freeing its memory
        for as long as they live, which `is_closed` tells.
        """
        cdef shared_ptr[Native] native = self._native
        if self._num_forks != num_forks() or native.get() == NULL:
            return
        cdef Patience patience = Patience(ABORT_GRACE, _is_interrupted, NULL)
        try:
            with nogil:
                native.get().abort()
                native.get().wait_ended(patience)
        except Timeout:
            pass  # it can be called no more, which is what was asked for

    def close(self, *, timeout=None):
        """End the communicator; what was launched is waited for. Idempotent.

        Healthy ones are finalized and destroyed, which takes until the other ranks do so, at
        most `timeout` seconds; after that, or after an error, it is aborted.

        Raises
        ------
        Timeout
            NCCL still keeps it: CUDA graphs that captured its calls live, and must go first.
        """
        cdef shared_ptr[Native] native = self._native
        if self._num_forks != num_forks() or native.get() == NULL:
            return
        cdef double seconds = self._seconds(timeout)
        # Longer than that: aborting takes a moment too.
        cdef Patience patience = Patience(seconds + ABORT_GRACE, _is_interrupted, NULL)
        try:
            with nogil:
                libnccl.end(native, seconds)
                native.get().wait_ended(patience)
        except BaseException as error:
            self.note(error)
            raise

    destroy = close

    # ---- Collectives on raw pointers --------------------------------------------

    def allreduce_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int op, stream
    ):
        cdef Operation o = _raw(Op.allreduce, sendbuf, recvbuf, count, dtype, stream)
        o.reduce_op = <ncclRedOp_t> op
        self.launch(o, None, None, self.timeout)

    def broadcast_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int root, stream
    ):
        cdef Operation o = _raw(Op.broadcast, sendbuf, recvbuf, count, dtype, stream)
        o.peer = root
        self.launch(o, None, None, self.timeout)

    def reduce_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int op, int root, stream
    ):
        cdef Operation o = _raw(Op.reduce, sendbuf, recvbuf, count, dtype, stream)
        o.reduce_op = <ncclRedOp_t> op
        o.peer = root
        self.launch(o, None, None, self.timeout)

    def all_gather_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t sendcount, int dtype, stream
    ):
        self.launch(
            _raw(Op.all_gather, sendbuf, recvbuf, sendcount, dtype, stream), None, None, self.timeout)

    def reduce_scatter_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t recvcount, int dtype, int op, stream
    ):
        cdef Operation o = _raw(Op.reduce_scatter, sendbuf, recvbuf, recvcount, dtype, stream)
        o.reduce_op = <ncclRedOp_t> op
        self.launch(o, None, None, self.timeout)

    def all_to_all_raw(self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, stream):
        self.launch(_raw(Op.all_to_all, sendbuf, recvbuf, count, dtype, stream), None, None, self.timeout)

    def gather_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int root, stream
    ):
        cdef Operation o = _raw(Op.gather, sendbuf, recvbuf, count, dtype, stream)
        o.peer = root
        self.launch(o, None, None, self.timeout)

    def scatter_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int root, stream
    ):
        cdef Operation o = _raw(Op.scatter, sendbuf, recvbuf, count, dtype, stream)
        o.peer = root
        self.launch(o, None, None, self.timeout)

    def send_raw(self, uintptr_t sendbuf, size_t count, int dtype, int peer, stream):
        cdef Operation o = _raw(Op.send, sendbuf, 0, count, dtype, stream)
        o.peer = peer
        self.launch(o, None, None, self.timeout)

    def recv_raw(self, uintptr_t recvbuf, size_t count, int dtype, int peer, stream):
        cdef Operation o = _raw(Op.recv, 0, recvbuf, count, dtype, stream)
        o.peer = peer
        self.launch(o, None, None, self.timeout)

    # ---- Collectives on arrays --------------------------------------------------

    def allreduce(self, x, out, op=ReduceOp.SUM, *, stream=None):
        """Reduce `x` over all ranks into `out`, which may be `x`. `op` may be a `PreMulSum`."""
        cdef BufferView src = self.input(x, "allreduce")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_allreduce(&o, src, dst, op)
        return self._issue(&o, src, dst, stream)

    def broadcast(self, x, out, int root, *, stream=None):
        """Copy `x` of `root` into `out` of every rank."""
        cdef BufferView src = self.input(x, "broadcast")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_broadcast(&o, src, dst, root)
        return self._issue(&o, src, dst, stream)

    def reduce(self, x, out, int root, op=ReduceOp.SUM, *, stream=None):
        """Reduce `x` over all ranks into `out` of `root`; None elsewhere."""
        cdef BufferView src = self.input(x, "reduce")
        cdef BufferView dst = None if out is None else output_of(out, x, src)
        cdef Operation o
        self.describe_reduce(&o, src, dst, root, op)
        return self._issue(&o, src, dst, stream)

    def all_gather(self, x, out, *, stream=None):
        """Copy every rank's `x` into `out` of all, one after the other."""
        cdef BufferView src = self.input(x, "all_gather")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_all_gather(&o, src, dst)
        return self._issue(&o, src, dst, stream)

    def reduce_scatter(self, x, out, op=ReduceOp.SUM, *, stream=None):
        """Reduce `x` over all ranks; each keeps the part of its rank in `out`."""
        cdef BufferView src = self.input(x, "reduce_scatter")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_reduce_scatter(&o, src, dst, op)
        return self._issue(&o, src, dst, stream)

    def all_to_all(self, x, out, *, stream=None):
        """Send the i-th part of `x` to rank i, and receive one of each into `out`."""
        cdef BufferView src = self.input(x, "all_to_all")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_all_to_all(&o, src, dst)
        return self._issue(&o, src, dst, stream)

    def gather(self, x, out, int root, *, stream=None):
        """Copy every rank's `x` into `out` of `root`, one after the other; None elsewhere."""
        cdef BufferView src = self.input(x, "gather")
        cdef BufferView dst = None if out is None else output_of(out, x, src)
        cdef Operation o
        self.describe_gather(&o, src, dst, root)
        return self._issue(&o, src, dst, stream)

    def scatter(self, x, out, int root, *, stream=None):
        """Copy the i-th part of `x` of `root` into `out` of rank i; `x` is None elsewhere."""
        cdef BufferView src = None if x is None else self.input(x, "scatter")
        cdef BufferView dst = self.output(out, "scatter")
        cdef Operation o
        self.describe_scatter(&o, src, dst, root)
        return self._issue(&o, dst if src is None else src, dst, stream)

    def send(self, x, int peer, *, stream=None):
        """Send `x` to rank `peer`, which receives as much of the same dtype."""
        cdef BufferView src = self.input(x, "send")
        cdef Operation o
        self.describe_send(&o, src, peer)
        return self._issue(&o, src, None, stream)

    def recv(self, out, int peer, *, stream=None):
        """Receive into `out` what rank `peer` sends."""
        cdef BufferView dst = self.output(out, "recv")
        cdef Operation o
        self.describe_recv(&o, dst, peer)
        return self._issue(&o, dst, None, stream)

    def allreduce_coalesced(self, xs, outs, op=ReduceOp.SUM, *, stream=None):
        """Reduce each of `xs` into the array at its place in `outs`, all as one group."""
        cdef list sources = list(xs)
        cdef list targets = sources if outs is xs else list(outs)
        cdef Py_ssize_t i
        cdef BufferView src
        cdef BufferView dst
        cdef Operation o
        if len(sources) != len(targets):
            arguments.check_size(
                "allreduce_coalesced", "outs", len(targets), len(sources), rank=self.rank)
        cdef Group group = Group()
        cdef KnownStream known
        known.array_type = NULL
        if stream is not None:
            o.stream = stream_handle(stream)
        self.check_usable()
        group._begin(<size_t> len(sources))
        for i in range(len(sources)):
            src = self.input(sources[i], "allreduce_coalesced")
            dst = output_of(targets[i], sources[i], src)
            self.describe_allreduce(&o, src, dst, op)
            if stream is None:
                o.stream = known_stream(src, &known)
                if dst is not src and known_stream(dst, &known) != o.stream:
                    self._refuse_streams()
            _add_to_group(group, self, o, src, dst)
        group._finish()

    cdef int _issue(self, Operation* o, BufferView first, BufferView second, stream) except -1:
        cdef KnownStream known
        known.array_type = NULL
        if stream is not None:
            o.stream = stream_handle(stream)
        else:
            o.stream = known_stream(first, &known)
            if second is not None and second is not first and known_stream(second, &known) != o.stream:
                self._refuse_streams()
        self.launch(o[0], first, second, self.timeout)
        return 0

    cdef int _refuse_streams(self) except -1:
        raise InvalidArray(
            "The libraries of x and out work on two streams now, and a call has one. Pass the stream "
            "that you have put in order with both.", rank=self.rank)

    # ---- One-sided operations (NCCL 2.29.2) -------------------------------------

    def put(self, x, int peer, Window window not None, size_t offset=0, *, int signal=0,
            int context=0, stream=None):
        """Write `x` into the window of rank `peer`, `offset` bytes from its start, and signal it."""
        cdef BufferView src = self.input(x, "put")
        cdef Operation o
        self.set_elements(&o, "put", src, src.count)
        o.op = Op.put
        o.in_ = src.data
        o.peer = self.peer("put", peer)
        o.window = window.open(self)
        o.offset = offset
        o.signal = signal
        o.context = context
        return self._issue(&o, src, None, stream)

    def signal(self, int peer, *, int signal=0, int context=0, stream):
        """Signal rank `peer` once `stream` has come here."""
        cdef Operation o
        o.op = Op.signal
        o.peer = self.peer("signal", peer)
        o.signal = signal
        o.context = context
        o.stream = stream_handle(stream)
        self.launch(o, None, None, self.timeout)

    def wait_signal(self, int peer, int count=1, *, int signal=0, int context=0, stream):
        """Let `stream` wait for `count` signals of rank `peer`."""
        cdef Operation o
        o.op = Op.wait_signal
        o.peer = self.peer("wait_signal", peer)
        o.signal_count = count
        o.signal = signal
        o.context = context
        o.stream = stream_handle(stream)
        self.launch(o, None, None, self.timeout)

    # ---- What NCCL keeps for a communicator --------------------------------------

    def premul_sum(self, scalar, str dtype, *, timeout=None):
        """Make the reduction that multiplies each rank's input by its `scalar`, then sums."""
        return _make_premul_sum(self, scalar, dtype, self._seconds(timeout))

    def register(self, x, *, timeout=None):
        """Tell NCCL of memory that will be used often, which lets it do without copies."""
        return _make_registration(self, view_of(x), self._seconds(timeout))

    def register_window(self, x, *, bint symmetric=True, timeout=None):
        """Make memory reachable for all ranks, all of which call this with as much (NCCL 2.27).

        `x` should be of `NcclMemory`. The collectives that use it need fewer steps.
        """
        cdef int flags = NCCL_WIN_COLL_SYMMETRIC if symmetric else NCCL_WIN_DEFAULT
        return _make_window(self, view_of(x), flags, self._seconds(timeout))

    # ---- Operations, described ---------------------------------------------------

    cdef int describe_allreduce(
        self, Operation* o, BufferView src, BufferView dst, reduce_op
    ) except -1:
        self.check_output("allreduce", src, dst, src.count, 0)
        o.op = Op.allreduce
        o.in_ = src.data
        o.out = dst.data
        self.set_elements(o, "allreduce", src, src.count)
        self.set_reduction(o, "allreduce", src, reduce_op)
        return 0

    cdef int describe_broadcast(self, Operation* o, BufferView src, BufferView dst, root) except -1:
        self.check_output("broadcast", src, dst, src.count, 0)
        o.op = Op.broadcast
        o.in_ = src.data
        o.out = dst.data
        o.peer = self.root("broadcast", root)
        return self.set_elements(o, "broadcast", src, src.count)

    cdef int describe_reduce(
        self, Operation* o, BufferView src, BufferView dst, root, reduce_op
    ) except -1:
        o.op = Op.reduce
        o.peer = self.root("reduce", root)
        o.in_ = src.data
        o.out = NULL
        if o.peer == self.rank:
            self._demand("reduce", "out", dst)
            self.check_output("reduce", src, dst, src.count, 0)
            o.out = dst.data
        self.set_elements(o, "reduce", src, src.count)
        return self.set_reduction(o, "reduce", src, reduce_op)

    cdef int describe_all_gather(self, Operation* o, BufferView src, BufferView dst) except -1:
        self.check_output("all_gather", src, dst, src.count * self.world_size,
                          -self.rank * <Py_ssize_t> src.nbytes)
        o.op = Op.all_gather
        o.in_ = src.data
        o.out = dst.data
        return self.set_elements(o, "all_gather", src, src.count)

    cdef int describe_reduce_scatter(
        self, Operation* o, BufferView src, BufferView dst, reduce_op
    ) except -1:
        cdef size_t count = self.chunk("reduce_scatter", src)
        self.check_output("reduce_scatter", src, dst, count, self.rank * <Py_ssize_t> dst.nbytes)
        o.op = Op.reduce_scatter
        o.in_ = src.data
        o.out = dst.data
        self.set_elements(o, "reduce_scatter", src, count)
        return self.set_reduction(o, "reduce_scatter", src, reduce_op)

    cdef int describe_all_to_all(self, Operation* o, BufferView src, BufferView dst) except -1:
        cdef size_t count = self.chunk("all_to_all", src)
        self.check_output("all_to_all", src, dst, src.count, NEVER_IN_PLACE)
        o.op = Op.all_to_all
        o.in_ = src.data
        o.out = dst.data
        return self.set_elements(o, "all_to_all", src, count)

    cdef int describe_gather(self, Operation* o, BufferView src, BufferView dst, root) except -1:
        o.op = Op.gather
        o.peer = self.root("gather", root)
        o.in_ = src.data
        o.out = NULL
        if o.peer == self.rank:
            self._demand("gather", "out", dst)
            self.check_output("gather", src, dst, src.count * self.world_size,
                              -self.rank * <Py_ssize_t> src.nbytes)
            o.out = dst.data
        return self.set_elements(o, "gather", src, src.count)

    cdef int describe_scatter(self, Operation* o, BufferView src, BufferView dst, root) except -1:
        o.op = Op.scatter
        o.peer = self.root("scatter", root)
        o.in_ = NULL
        if o.peer == self.rank:
            self._demand("scatter", "x", src)
            self.check_output("scatter", src, dst, self.chunk("scatter", src),
                              self.rank * <Py_ssize_t> dst.nbytes)
            o.in_ = src.data
        o.out = dst.data
        return self.set_elements(o, "scatter", dst, dst.count)

    cdef int describe_send(self, Operation* o, BufferView src, peer) except -1:
        o.op = Op.send
        o.peer = self.peer("send", peer)
        o.in_ = src.data
        return self.set_elements(o, "send", src, src.count)

    cdef int describe_recv(self, Operation* o, BufferView dst, peer) except -1:
        o.op = Op.recv
        o.peer = self.peer("recv", peer)
        o.out = dst.data
        return self.set_elements(o, "recv", dst, dst.count)

    # ---- Checks -----------------------------------------------------------------

    cdef BufferView input(self, object array, str op):
        cdef BufferView view = view_of(array)
        self._check_device(view, op)
        if not view.is_contiguous:
            raise InvalidArray(
                f"{op}: the array is not C-contiguous, and NCCL would move what lies between its "
                "elements. Pass a contiguous copy.", op=op, rank=self.rank)
        return view

    cdef BufferView output(self, object array, str op):
        cdef BufferView view = output_view_of(array)
        self._check_device(view, op)
        return view

    cdef int _check_device(self, BufferView view, str op) except -1:
        if view.device_type != CUDA:
            raise UnsupportedOp(
                f"{op}: the array is in host memory, which NCCL does not reach. Use HybridBackend, "
                "which sends arrays of either kind their way, or move it to the GPU.",
                op=op, rank=self.rank)
        if view.device_id != self.device and view.device_id >= 0:
            raise InvalidArray(
                f"{op}: the array is on GPU {view.device_id}, and this communicator uses "
                f"GPU {self.device}.", op=op, rank=self.rank)
        return 0

    # `in_place` is how many bytes past the start of x an out that shares its memory begins.
    cdef int check_output(
        self, str op, BufferView src, BufferView dst, size_t count, Py_ssize_t in_place
    ) except -1:
        if dst is not src:
            self._check_device(dst, op)
        if dst.dtype != src.dtype:
            arguments.check_out_dtype(
                op, DTYPE_NAMES[src.dtype], DTYPE_NAMES[dst.dtype], rank=self.rank)
        if dst.count != count:
            arguments.check_size(op, "out", dst.count, count, rank=self.rank)
        if (in_place == NEVER_IN_PLACE or dst.data != <char*> src.data + in_place) and overlap(src, dst):
            arguments.raise_overlap(op, rank=self.rank)
        return 0

    cdef int set_elements(self, Operation* o, str op, BufferView view, size_t count) except -1:
        # Not every NCCL and GPU knows floats of 8 bits, and all can move them as the bytes that
        # they are.
        o.dtype = ncclUint8 if view.dtype >= FLOAT8_E4M3 else ELEMENTS[view.dtype].dtype
        o.count = count * <size_t> ELEMENTS[view.dtype].count
        return 0

    cdef int set_reduction(self, Operation* o, str op, BufferView view, reduce_op) except -1:
        cdef int reduction
        if view.dtype >= FLOAT8_E4M3:
            self.check_float8(op, view.dtype)
            o.dtype = ELEMENTS[view.dtype].dtype
        if type(reduce_op) is PreMulSum:
            o.reduce_op = (<PreMulSum> reduce_op).open(self, op, view.dtype)
            if current_group() != NULL:
                # Launched when the block ends, by when nobody else may hold it.
                (<Group> current_group())._kept.append(reduce_op)
            return 0
        reduction = reduce_op
        if not _is_reducible(view.dtype, reduction):
            self._refuse_reduction(op, view.dtype, reduce_op)
        o.reduce_op = REDUCE_OPS[reduction]
        return 0

    # NCCL refuses them when it launches, and a non-blocking communicator does not get over it.
    cdef int check_float8(self, str op, int dtype) except -1:
        if version_code < 22400:
            raise UnsupportedOp(
                f"{op}: NCCL reduces {DTYPE_NAMES[dtype]} since 2.24, and this one is older. Convert the "
                "array.", op=op, rank=self.rank)
        if self._compute_capability == 0:
            self._compute_capability = compute_capability(self.device)
        if self._compute_capability < HOPPER:
            raise UnsupportedOp(
                f"{op}: NCCL reduces {DTYPE_NAMES[dtype]} on GPUs of sm_90 and newer, and this one is "
                f"sm_{self._compute_capability}. Convert the array.", op=op, rank=self.rank)
        return 0

    cdef int _refuse_reduction(self, str op, int dtype, reduce_op) except -1:
        cdef str name = DTYPE_NAMES[dtype]
        if arguments.is_reducible(name, reduce_op):
            raise UnsupportedOp(
                f"{op}: NCCL has no {ReduceOp(reduce_op).name} of {name}. Convert the array, or reduce it "
                "on the host.", op=op, rank=self.rank)
        arguments.check_reduction(op, name, reduce_op, rank=self.rank)
        return 0

    cdef int root(self, str op, root) except -1:
        if type(root) is not int or not 0 <= root < self.world_size:
            arguments.check_root(op, root, rank=self.rank, world_size=self.world_size)
        return root

    cdef int peer(self, str op, peer) except -1:
        if type(peer) is not int or not 0 <= peer < self.world_size or peer == self.rank:
            arguments.check_peer(op, peer, rank=self.rank, world_size=self.world_size)
        return peer

    cdef size_t chunk(self, str op, BufferView view) except? 0:
        if view.count % self.world_size != 0:
            arguments.per_rank_count(op, "x", view.count, rank=self.rank, world_size=self.world_size)
        return view.count // self.world_size

    cdef int _demand(self, str op, str name, BufferView view) except -1:
        if view is None:
            arguments.raise_missing_array(op, name, "this rank is the root", rank=self.rank)
        return 0

    # ---- Calls ------------------------------------------------------------------

    cdef int launch(
        self, const Operation& operation, BufferView first, BufferView second, double timeout
    ) except -1:
        self.check_usable()
        if current_group() != NULL:
            return _add_to_group(<Group> current_group(), self, operation, first, second)
        # No copy of the pointer: it stays to the end, and the caller keeps this object.
        cdef Patience patience = Patience(timeout, _is_interrupted, NULL)
        try:
            with nogil:
                self._native.get().launch(operation, patience)
        except BaseException as error:
            self.note(error)
            raise
        return 0

    cdef int check_usable(self) except -1:
        if self._first_error is not None or self._num_forks != num_forks():
            self._refuse()
        return 0

    cdef int _check_own(self) except -1:
        if self._num_forks != num_forks():
            raise LockPoisoned(
                "This communicator belongs to the parent process: a forked child cannot use it, nor "
                "CUDA. Start the child with the spawn method, and make one there.", rank=self.rank)
        return 0

    cdef int _refuse(self) except -1:
        self._check_own()
        raise LockPoisoned(
            "The communicator ended with an earlier error: "
            f"{str(self._first_error).splitlines()[0]}\nMake a new one.",
            rank=self.rank, op=getattr(self._first_error, "op", None)) from self._first_error

    cdef int note(self, object error) except -1:
        """Name this rank in an error, and remember the one that ended the communicator."""
        _name_rank(error, self.rank)
        if self._first_error is None and self._native.get().has_failed():
            # A copy has no traceback, whose frames would keep the caller's arrays alive.
            self._first_error = copy.copy(error)
        return 0

    cdef Patience _patience(self, double seconds) except *:
        self.check_usable()
        return Patience(seconds, _is_interrupted, NULL)

    cdef double _seconds(self, timeout) except? -1:
        return self.timeout if timeout is None else arguments.check_timeout(timeout)


# ---- Groups --------------------------------------------------------------------------

@cython.final
cdef class Group:
    """Launch several operations as one.

        with Group():
            communicator.send(x, 1)
            communicator.recv(y, 1)

    What is called in the ``with`` block is written down, and launched at its end: sends and
    receives then progress together, and many small operations cost one launch. If the block
    raises, nothing is launched. Arguments are checked where the calls are made. A group
    within a group is part of it. Methods that return something (`split`, `register`, ...)
    are not part of groups, and run at once.
    """

    def __enter__(self):
        if self._is_open:
            raise RuntimeError("This group is open already.")
        self._is_open = True
        self._is_inner = current_group() != NULL
        if not self._is_inner:
            self._begin(TYPICAL_SIZE)
            (&current_group())[0] = <void*> self
            Py_INCREF(self)  # the thread's
        return self

    def __exit__(self, exc_type, exc, traceback):
        if not self._is_open:
            raise RuntimeError("This group is not open.")
        if self._is_inner:
            self._is_open = False
            return
        if current_group() != <void*> self:
            raise RuntimeError("A group must end in the thread in which it began.")
        self._is_open = False
        (&current_group())[0] = NULL
        Py_DECREF(self)  # our caller has a reference, too
        try:
            if exc_type is None:
                self._launch()
        finally:
            self._operations.clear()
            self._kept = None
            self._communicators = None

    cdef int _begin(self, size_t size) except -1:
        self._operations.reserve(size)
        self._kept = []
        self._communicators = []
        return 0

    cdef int _finish(self) except -1:
        """Launch, or hand everything to the group that this thread collects."""
        if current_group() == NULL:
            return self._launch()
        cdef Group outer = <Group> current_group()
        outer._operations.insert(
            outer._operations.end(), self._operations.begin(), self._operations.end())
        outer._kept += self._kept
        outer._communicators += self._communicators
        return 0

    cdef int _launch(self) except -1:
        if self._operations.empty():
            return 0
        cdef Communicator first = self._communicators[0]
        cdef Patience patience = Patience(first.timeout, _is_interrupted, NULL)
        cdef Communicator each
        for each in self._communicators:
            if each.is_blocking != first.is_blocking:
                raise UnsupportedOp("group: NCCL cannot mix blocking and other communicators.", op="group")
        try:
            with nogil:
                launch_group(self._operations, patience)
        except BaseException as error:
            for each in self._communicators:
                each.note(error)
            raise
        return 0


cdef int _add_to_group(
    Group group, Communicator communicator, const Operation& operation, BufferView first,
    BufferView second,
) except -1:
    cdef GroupedOperation grouped
    grouped.communicator = communicator._native.get()
    grouped.operation = operation
    group._operations.push_back(grouped)
    if first is not None:
        group._kept.append(_keeper_of(first))
    if second is not None and second is not first:
        group._kept.append(_keeper_of(second))
    cdef Py_ssize_t count = len(group._communicators)
    if count == 0 or group._communicators[count - 1] is not communicator:
        group._communicators.append(communicator)
    return 0


cdef inline object _keeper_of(BufferView view):
    """Return what keeps the memory alive: the array alone, unless the view holds an export of it."""
    if view._buffer == NULL and view._capsule == NULL and view._versioned == NULL:
        return view.owner
    return view


# ---- Streams in order ----------------------------------------------------------------

@cython.final
cdef class Lane:
    """For nccl_group.pyx alone: NCCL's own C++ is part of this module."""

    def __init__(self):
        raise TypeError("A Lane is made by NcclGroup")

    cdef uint64_t launch(
        self, const Operation* operations, size_t count, const cudaStream_t* callers,
        size_t num_callers, bint is_async, double seconds
    ) except? 0:
        cdef Patience patience = Patience(seconds, _is_interrupted, NULL)
        cdef uint64_t ticket
        try:
            with nogil:
                ticket = self._lane.get().launch(
                    operations, count, callers, num_callers, is_async, seconds, patience)
        except BaseException as error:
            self._communicator.note(error)
            raise
        return ticket

    cdef int hand_back(
        self, uint64_t ticket, const cudaStream_t* callers, size_t num_callers
    ) except -1:
        try:
            with nogil:
                self._lane.get().hand_back(ticket, callers, num_callers)
        except BaseException as error:
            self._communicator.note(error)
            raise
        return 0

    cdef int synchronize(self, uint64_t ticket, double seconds) except -1:
        cdef Patience patience = Patience(seconds, _is_interrupted, NULL)
        try:
            with nogil:
                self._lane.get().synchronize(ticket, patience)
        except BaseException as error:
            self._communicator.note(error)
            raise
        return 0

    cdef bint is_done(self, uint64_t ticket) except -1:
        cdef bint done
        try:
            with nogil:
                done = self._lane.get().is_done(ticket)
            return done
        except BaseException as error:
            self._communicator.note(error)
            raise

    cdef uint64_t num_done(self) except? 0:
        cdef uint64_t count
        try:
            with nogil:
                count = self._lane.get().num_done()
            return count
        except BaseException as error:
            self._communicator.note(error)
            raise

    cdef uint64_t num_seen_done(self) noexcept:
        return self._lane.get().num_seen_done()

    cdef uint64_t num_launched(self) noexcept:
        return self._lane.get().num_launched()

    cdef cudaStream_t stream(self) noexcept:
        return self._lane.get().stream()

    cdef int heed(self, capsule) except -1:
        self._lane.get().heed((<Alarm*> PyCapsule_GetPointer(capsule, "ferro::Alarm"))[0])
        return 0

    cdef int attend(self, int fd, vector[int] members) except -1:
        self._lane.get().attend(fd, members)
        return 0

    cdef void leave(self) noexcept:
        self._lane.get().leave()


cdef Lane open_lane(Communicator communicator, cudaStream_t stream):
    cdef Lane lane = Lane.__new__(Lane)
    communicator.check_usable()
    lane._communicator = communicator
    lane._lane = NativeLane.open(communicator._native, stream)
    return lane


def attendance_nbytes(int num_members):
    """Return how much memory so many ranks need for `NcclGroup.attend`."""
    return libnccl.attendance_nbytes(num_members)


cdef void on_done(void (*hook)() noexcept nogil) noexcept:
    libnccl.on_done(hook)


# ---- What NCCL keeps for a communicator ----------------------------------------------

@cython.final
@cython.no_gc_clear  # __dealloc__ needs the communicator
cdef class PreMulSum:
    """A reduction that multiplies each rank's input by a number of its own, then sums.

    Made by `Communicator.premul_sum`; of that communicator and one dtype.
    """

    def __init__(self):
        raise TypeError("A PreMulSum is made by Communicator.premul_sum")

    @property
    def value(self):
        """NCCL's number of the reduction, for the methods that take raw pointers."""
        return <int> self.open(self._communicator, "premul_sum", self._dtype)

    def close(self, *, timeout=None):
        """Give the reduction back. Idempotent."""
        if self._is_closed or self._communicator.is_closed:
            return
        cdef Patience patience = self._communicator._patience(self._communicator._seconds(timeout))
        self._is_closed = True
        try:
            with nogil:
                self._communicator._native.get().destroy_reduce_op(self._reduce_op, patience)
        except BaseException as error:
            self._communicator.note(error)
            raise

    cdef ncclRedOp_t open(self, Communicator communicator, str op, int dtype) except *:
        if self._is_closed:
            raise ValueError("This PreMulSum is closed.")
        if communicator is not self._communicator:
            raise UnsupportedOp(f"{op}: this PreMulSum is another communicator's.", op=op)
        if dtype != self._dtype:
            arguments.check_out_dtype(
                op, DTYPE_NAMES[dtype], DTYPE_NAMES[self._dtype], rank=communicator.rank)
        return self._reduce_op

    def __dealloc__(self):
        if self._is_closed or self._communicator is None:
            return
        if self._communicator._num_forks == num_forks():
            self._communicator._native.get().destroy_reduce_op_later(self._reduce_op)


cdef PreMulSum _make_premul_sum(Communicator communicator, scalar, str dtype, double seconds):
    cdef PreMulSum made = PreMulSum.__new__(PreMulSum)
    cdef int code = CODES[dtype] if dtype in CODES else -1
    if code < 0 or ELEMENTS[code].count != 1 or ELEMENTS[code].dtype < ncclFloat16:
        raise UnsupportedOp(f"premul_sum: NCCL multiplies floats, and {dtype!r} is none.")
    if code >= FLOAT8_E4M3:
        communicator.check_float8("premul_sum", code)
    cdef bytes value = numpy.array(scalar, _numpy_dtype(dtype)).tobytes()
    cdef char* data = value
    cdef Patience patience = communicator._patience(seconds)
    try:
        with nogil:
            made._reduce_op = communicator._native.get().create_premul_sum(
                data, ELEMENTS[code].dtype, ncclScalarHostImmediate, patience)
    except BaseException as error:
        made._is_closed = True
        communicator.note(error)
        raise
    made._communicator = communicator
    made._dtype = code
    return made


def _numpy_dtype(str dtype):
    if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, dtype))
    return numpy.dtype(dtype)


@cython.final
@cython.no_gc_clear  # __dealloc__ needs the communicator
cdef class Registration:
    """Memory that a communicator knows of, kept alive; made by `Communicator.register`."""

    cdef Communicator _communicator
    cdef BufferView _view
    cdef void* _registration

    def __init__(self):
        raise TypeError("A Registration is made by Communicator.register")

    def close(self, *, timeout=None):
        """Let the communicator forget the memory. Idempotent."""
        cdef void* registration = self._registration
        self._registration = NULL
        if registration == NULL or self._communicator.is_closed:
            return
        cdef Patience patience = self._communicator._patience(self._communicator._seconds(timeout))
        try:
            with nogil:
                self._communicator._native.get().deregister_buffer(registration, patience)
        except BaseException as error:
            self._communicator.note(error)
            raise
        self._view = None

    def __dealloc__(self):
        if self._registration != NULL and self._communicator._num_forks == num_forks():
            self._communicator._native.get().deregister_later(self._registration)


cdef Registration _make_registration(Communicator communicator, BufferView view, double seconds):
    cdef Registration made = Registration.__new__(Registration)
    cdef Patience patience = communicator._patience(seconds)
    communicator._check_device(view, "register")
    made._communicator = communicator
    made._view = view
    try:
        with nogil:
            made._registration = communicator._native.get().register_buffer(
                view.data, view.nbytes, patience)
    except BaseException as error:
        communicator.note(error)
        raise
    return made


@cython.final
cdef class Window:
    """Memory that all ranks of a communicator reach; made by `Communicator.register_window`.

    Stays until it is closed, or its communicator is: giving it back is a call of all ranks,
    which no collector can make.
    """

    cdef Communicator _communicator
    cdef BufferView _view
    cdef ncclWindow_t _window  # null also where NCCL makes none
    cdef bint _is_closed

    def __init__(self):
        raise TypeError("A Window is made by Communicator.register_window")

    def close(self, *, timeout=None):
        """Give the window back, on all ranks. Idempotent."""
        cdef ncclWindow_t window = self._window
        self._window = NULL
        self._is_closed = True
        if window == NULL or self._communicator.is_closed:
            return
        cdef Patience patience = self._communicator._patience(self._communicator._seconds(timeout))
        try:
            with nogil:
                self._communicator._native.get().deregister_window(window, patience)
        except BaseException as error:
            self._communicator.note(error)
            raise
        self._view = None

    cdef ncclWindow_t open(self, Communicator communicator) except NULL:
        if self._is_closed:
            raise ValueError("This Window is closed.")
        if self._window == NULL:
            raise UnsupportedOp(
                "put: NCCL has made no window of this memory, as it does where the GPUs of the ranks do "
                "not reach each other's.", op="put")
        if communicator is not self._communicator:
            raise UnsupportedOp("put: this Window is another communicator's.", op="put")
        return self._window


cdef Window _make_window(Communicator communicator, BufferView view, int flags, double seconds):
    cdef Window made = Window.__new__(Window)
    cdef Patience patience = communicator._patience(seconds)
    communicator._check_device(view, "register_window")
    made._communicator = communicator
    made._view = view
    try:
        with nogil:
            made._window = communicator._native.get().register_window(
                view.data, view.nbytes, flags, patience)
    except BaseException as error:
        communicator.note(error)
        raise
    return made


@cython.final
cdef class NcclMemory:
    """Memory of a GPU as NCCL likes it best; exports ``__cuda_array_interface__`` as uint8.

    Parameters
    ----------
    nbytes : int
    device : int, optional
        The current device if not given.
    """

    cdef void* _data
    cdef readonly size_t nbytes
    cdef readonly int device
    cdef int _num_forks

    def __init__(self, size_t nbytes, device=None):
        cdef const Cudart* cuda = cudart()
        self.nbytes = nbytes
        self.device = current_device() if device is None else device
        self._num_forks = num_forks()
        cdef Patience patience = Patience(DEFAULT_TIMEOUT, _is_interrupted, NULL)
        with nogil:
            self._data = libnccl.allocate(cuda[0], self.device, nbytes, patience)

    @property
    def address(self):
        return <uintptr_t> self._data

    @property
    def __cuda_array_interface__(self):
        return {
            "version": 3, "shape": (self.nbytes,), "typestr": "|u1", "strides": None,
            "data": (self.address, False), "stream": None,
        }

    def __dlpack_device__(self):
        return CUDA, self.device

    def close(self):
        """Free the memory, once the stream in which this thread works is done with it. Idempotent.

        Other streams that use it must be done before.
        """
        cdef void* data = self._data
        cdef const Cudart* cuda = cudart()
        self._data = NULL
        if data == NULL or self._num_forks != num_forks():
            return
        cdef vector[cudaStream_t] users = streams_of_thread(self.device)
        cdef Patience patience = Patience(DEFAULT_TIMEOUT, _is_interrupted, NULL)
        with nogil:
            libnccl.free(cuda[0], self.device, data, users, patience)

    def __del__(self):
        # Not __dealloc__, which may call no Python: the libraries know their streams.
        if self._data == NULL or self._num_forks != num_forks() or sys.is_finalizing():
            return
        libnccl.free_later(cudart()[0], self.device, self._data, streams_of_thread(self.device))
        self._data = NULL


# ---- Helpers -------------------------------------------------------------------------

cdef int _name_rank(object error, int rank) except -1:
    if isinstance(error, DistributedError) and error.rank is None:
        error.rank = rank
    return 0


cdef vector[ncclUniqueId] _ids_of(unique_ids) except *:
    cdef vector[ncclUniqueId] ids
    cdef UniqueId unique_id
    for unique_id in (unique_ids,) if isinstance(unique_ids, UniqueId) else unique_ids:
        if unique_id is None:
            raise TypeError("unique_ids must be a UniqueId or several, and one of them is None.")
        ids.push_back(unique_id._id)
    if ids.empty():
        raise ValueError("unique_ids is empty, and a communicator needs at least one.")
    return ids


cdef Communicator _wrap(shared_ptr[Native] native, double timeout, bint is_blocking):
    cdef Communicator communicator = Communicator.__new__(Communicator)
    communicator._native = native
    communicator.rank = native.get().rank()
    communicator.world_size = native.get().world_size()
    communicator.device = native.get().device()
    communicator.timeout = timeout
    communicator.is_blocking = is_blocking
    communicator._num_forks = num_forks()
    return communicator


cdef bint _is_in_force(int blocking):
    """Tell whether a communicator blocks: the environment is stronger than the option."""
    forced = os.environ.get("NCCL_COMM_BLOCKING", "")
    return int(forced) == 1 if forced in ("0", "1") else blocking == 1


cdef inline Operation _raw(
    Op op, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, stream
) except *:
    cdef Operation o
    if not 0 <= dtype < <int> libnccl.ncclNumTypes:
        raise UnsupportedOp(f"NCCL has no dtype number {dtype}; dtype_to_nccl gives them by name.")
    o.op = op
    o.in_ = <const void*> sendbuf
    o.out = <void*> recvbuf
    o.count = count
    o.dtype = <ncclDataType_t> dtype
    o.stream = stream_handle(stream)
    return o


cdef BufferView output_of(object out, object x, BufferView src):
    if out is x and src.owner is x and is_output(src):
        return src
    return output_view_of(out)


cdef inline bint _is_reducible(int dtype, int reduction) noexcept:
    if not SUM <= reduction <= MAX:
        return False
    if dtype >= FLOAT8_E4M3:
        # ncclAvg multiplies by 1/n in the dtype itself, whose smallest step is larger.
        return reduction != MEAN
    if ELEMENTS[dtype].is_number:
        return reduction != MEAN or ELEMENTS[dtype].dtype >= ncclFloat16
    if dtype == BOOLEAN:
        return reduction == MIN or reduction == MAX
    if dtype == COMPLEX64 or dtype == COMPLEX128:
        return reduction == SUM or reduction == MEAN
    return False


# ---- Loading and exit ----------------------------------------------------------------

cdef int version_code = 0
ncclGetVersion(&version_code)
if get_version() < OLDEST_NCCL:
    raise BackendUnavailable(
        f"NCCL {'.'.join(map(str, get_version()))} is loaded, and "
        f"{'.'.join(map(str, OLDEST_NCCL))} is the oldest that works here. "
        "Upgrade nvidia-nccl-cu12 or nvidia-nccl-cu13.")


def _shut_down():
    """End what is left, while the interpreter and CUDA are still whole."""
    with nogil:
        libnccl.shut_down(EXIT_GRACE)


num_forks()  # counts from here on
atexit.register(_shut_down)
