# Operations: what NCCL can be asked to do with arrays, checked and written down.

cimport cython
from libc.stdint cimport uintptr_t

from ferro_dist._native cimport libnccl
from ferro_dist._native.buffer_view cimport (
    BOOLEAN, BufferView, COMPLEX128, COMPLEX64, E4M3, E5M2, NEVER_IN_PLACE, output_view_of, overlap,
    view_of,
)
from ferro_dist._native.dlpack cimport CUDA
from ferro_dist._native.libnccl cimport (
    ncclBfloat16, ncclDataType_t, ncclFloat16, ncclFloat32, ncclFloat64, ncclFloat8e4m3, ncclFloat8e5m2,
    ncclInt32, ncclInt64, ncclInt8, ncclRedOp_t, ncclUint32, ncclUint64, ncclUint8, Op, Operation,
)

from ferro_dist import arguments
from ferro_dist._native.cuda_runtime import compute_capability
from ferro_dist._native.nccl_library import get_version
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import InvalidArray, SizeMismatch, UnsupportedOp
from ferro_dist.reduce_op import ReduceOp

__all__ = ["Member", "dtype_to_nccl", "reduce_op_to_nccl"]

cdef int HOPPER = 90  # the compute capability, ten times
cdef size_t MAX_COUNT = arguments.MAX_COUNT


# ---- Dtypes and reductions -----------------------------------------------------------

# By ferro::DType: what NCCL moves in its place, how many of those make up an element, and
# whether NCCL's reductions of those are all right for the element.
cdef struct Element:
    ncclDataType_t dtype
    int count
    bint is_number

cdef Element[17] ELEMENTS
ELEMENTS[:] = [
    Element(ncclUint8, 1, False),   # bool
    Element(ncclInt8, 1, True),
    Element(ncclUint8, 1, True),
    Element(ncclUint8, 2, False),   # int16: NCCL has no integers of 16 bits, and moves their bytes
    Element(ncclUint8, 2, False),   # uint16
    Element(ncclInt32, 1, True),
    Element(ncclUint32, 1, True),
    Element(ncclInt64, 1, True),
    Element(ncclUint64, 1, True),
    Element(ncclFloat16, 1, True),
    Element(ncclBfloat16, 1, True),
    Element(ncclFloat32, 1, True),
    Element(ncclFloat64, 1, True),
    Element(ncclFloat32, 2, False),  # complex64: two numbers, each added and averaged by itself
    Element(ncclFloat64, 2, False),  # complex128
    Element(ncclFloat8e4m3, 1, True),
    Element(ncclFloat8e5m2, 1, True),
]

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


cdef int float_code(str dtype) except -1:
    cdef int code = CODES.get(dtype, <int> BOOLEAN)
    if ELEMENTS[code].count != 1 or ELEMENTS[code].dtype < ncclFloat16:
        raise UnsupportedOp(f"premul_sum: NCCL multiplies floats, and {dtype!r} is none.")
    return code


cdef ncclDataType_t nccl_dtype(int code) noexcept:
    return ELEMENTS[code].dtype


# ---- Calls and their arguments -------------------------------------------------------

cdef class Member:
    """One rank of a communicator, as far as the arguments of its calls can be checked with it."""

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

    cdef int describe_raw(
        self, Operation* o, Op op, str name, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype
    ) except -1:
        if not 0 <= dtype < <int> libnccl.ncclNumTypes:
            raise UnsupportedOp(
                f"{name}: NCCL has no dtype number {dtype}; dtype_to_nccl gives them by name.",
                op=name, rank=self.rank)
        if count > MAX_COUNT // <size_t> self.world_size:
            raise SizeMismatch(
                f"{name}: no memory holds {count} elements for each of {self.world_size} ranks.",
                op=name, rank=self.rank)
        o.op = op
        o.in_ = <const void*> sendbuf
        o.out = <void*> recvbuf
        o.count = count
        o.dtype = <ncclDataType_t> dtype
        if dtype >= <int> ncclFloat8e4m3:
            self._set_raw_float8(o, name)
        return 0

    # As set_elements and set_summands do it for arrays.
    cdef int _set_raw_float8(self, Operation* o, str name) except -1:
        if o.op == Op.allreduce or o.op == Op.reduce or o.op == Op.reduce_scatter:
            return self.check_float8(name, E4M3 if o.dtype == ncclFloat8e4m3 else E5M2)
        o.dtype = ncclUint8
        return 0

    cdef BufferView input(self, object array, str op):
        cdef BufferView view = view_of(array)
        self.check_device(view, op)
        if not view.is_contiguous:
            raise InvalidArray(
                f"{op}: the array is not C-contiguous, and NCCL would move what lies between its "
                "elements. Pass a contiguous copy.", op=op, rank=self.rank)
        return view

    cdef BufferView output(self, object array, str op):
        cdef BufferView view = output_view_of(array)
        self.check_device(view, op)
        return view

    @cython.final
    cdef int check_device(self, BufferView view, str op) except -1:
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

    @cython.final
    cdef int check_output(
        self, str op, BufferView src, BufferView dst, size_t count, Py_ssize_t in_place
    ) except -1:
        if dst is not src:
            if dst.device_type != CUDA:
                arguments.raise_mixed_devices(op, rank=self.rank)
            self.check_device(dst, op)
        if dst.dtype != src.dtype:
            arguments.check_out_dtype(
                op, DTYPE_NAMES[src.dtype], DTYPE_NAMES[dst.dtype], rank=self.rank)
        if dst.count != count:
            arguments.check_size(op, "out", dst.count, count, rank=self.rank)
        if (in_place == NEVER_IN_PLACE or dst.data != <char*> src.data + in_place) and overlap(src, dst):
            arguments.raise_overlap(op, rank=self.rank)
        return 0

    @cython.final
    cdef int set_elements(self, Operation* o, str op, BufferView view, size_t count) except -1:
        # Not every NCCL and GPU knows floats of 8 bits, but all can move them as bytes.
        o.dtype = ncclUint8 if view.dtype >= E4M3 else ELEMENTS[view.dtype].dtype
        o.count = count * <size_t> ELEMENTS[view.dtype].count
        return 0

    @cython.final
    cdef int set_reduction(self, Operation* o, str op, BufferView view, reduce_op) except -1:
        cdef int reduction
        self.set_summands(o, op, view)
        # Not the int that a ReduceOp is: NCCL numbers its reductions otherwise, and would do another one.
        if type(reduce_op) is not ReduceOp:
            return self.set_own_reduction(o, op, view, reduce_op)
        reduction = reduce_op
        if not _is_reducible(view.dtype, reduction):
            self._refuse_reduction(op, view.dtype, reduce_op)
        # The mean of one is its sum, for which NCCL moves nothing in place: ncclAvg would launch a
        # kernel that multiplies all by 1.
        if reduction == MEAN and self.world_size == 1:
            reduction = SUM
        o.reduce_op = REDUCE_OPS[reduction]
        return 0

    cdef int set_own_reduction(self, Operation* o, str op, BufferView view, reduce_op) except -1:
        return self.set_reduction(o, op, view, arguments.reduce_op_of(reduce_op))

    @cython.final
    cdef int set_summands(self, Operation* o, str op, BufferView view) except -1:
        if view.dtype >= E4M3:
            self.check_float8(op, view.dtype)
            o.dtype = ELEMENTS[view.dtype].dtype
        return 0

    # NCCL refuses them only when it launches, from which a non-blocking communicator does not recover.
    cdef int check_float8(self, str op, int dtype) except -1:
        if get_version() < (2, 24):
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
        if dtype >= E4M3:
            raise UnsupportedOp(
                f"{op}: there is no {reduce_op.name} of {name}, whose steps are too coarse for NCCL's. "
                "Use SUM and divide, or convert to float16 or wider.", op=op, rank=self.rank)
        if arguments.is_reducible(name, reduce_op):
            raise UnsupportedOp(
                f"{op}: NCCL has no {reduce_op.name} of {name}. Convert the array, or reduce it "
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


cdef inline bint _is_reducible(int dtype, int reduction) noexcept:
    if dtype >= E4M3:
        # ncclAvg multiplies by 1/n in the dtype itself, whose steps are too coarse for that.
        return reduction != MEAN
    if ELEMENTS[dtype].is_number:
        return reduction != MEAN or ELEMENTS[dtype].dtype >= ncclFloat16
    if dtype == BOOLEAN:
        return reduction == MIN or reduction == MAX
    if dtype == COMPLEX64 or dtype == COMPLEX128:
        return reduction == SUM or reduction == MEAN
    return False
