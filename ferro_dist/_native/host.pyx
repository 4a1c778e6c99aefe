# The host engine as Python sees it: check, convert, call once, translate.
#
# Every collective has the same shape: views of its arrays, the checks that need
# no other rank, one call. The words of a failed check are in arguments.py.

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport uint32_t, uintptr_t
from libc.string cimport memcpy
from libcpp.memory cimport shared_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

cimport cython
from ferro_dist._native cimport libferro as ferro
from ferro_dist._native.buffer_view cimport (
    BufferView, delivered, is_output, NEVER_IN_PLACE, output_of, output_view_of, overlap, view_of,
)
from ferro_dist._native.libferro cimport (
    Collective,
    Engine,
    Heap,
    Op,
    PeerReads,
    PointToPoint,
    Segment,
    Task,
    Wiring,
)

import copy
import os
import weakref
from time import monotonic

from numpy import empty, ndarray

from ferro_dist import arguments
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import (
    ChannelClosed,
    DistributedError,
    InvalidArray,
    LockPoisoned,
    SizeMismatch,
    UnsupportedOp,
)

__all__ = [
    "PEER_READS", "Closer", "Communicator", "HostWork", "SymmetricMemory", "begin_exit", "copy_plain",
    "create_segment", "kernel_isa", "kernel_notices_deaths",
]

cdef int CPU = 1  # DLPack's number
cdef double UNLIMITED = 1e9  # seconds
cdef double SHORTEST_TIMEOUT = 1e-3  # seconds, for what is left of a call whose time is up
cdef size_t FEW_NBYTES = 64 << 10  # copied before another thread could make use of the GIL
cdef size_t FEW = 16  # pieces of work, which are quickly searched for those that are done
cdef enum:
    MAX_TAG = 0xFFFFFFFF
# By the names that FERRO_DIST_PEER_READS gives them.
PEER_READS = {
    "automatic": <int> PeerReads.automatic,
    "always": <int> PeerReads.always,
    "never": <int> PeerReads.never,
}
cdef object NO_TAG = 0  # the only 0 in the interpreter, so that `is` finds it

# How many forks lie between this process and the first: an object that was made at another number
# belongs to a parent process, and must not be used.
cdef int num_forks = 0


def _count_fork():
    global num_forks
    num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


def create_segment(int size):
    """Make the shared memory of `size` ranks of one host and return its file descriptor."""
    return Segment.create_file(size)


def kernel_isa():
    """Name the instruction set that reductions use on this processor."""
    return (<bytes> ferro.kernel_isa()).decode()


def kernel_notices_deaths():
    """Tell whether ranks of one host learn of a death at once, and not by a timeout."""
    return ferro.kernel_notices_deaths()


def copy_plain(
    list places, list arrays, *, size_t start=0, size_t stop=0, size_t streamed_nbytes, size_t limit_nbytes
):
    """Copy each array to its place, where that is nothing but copying bytes.

    Parameters
    ----------
    places : list of array
    arrays : list of array or None
        As many. One that lies in its place already stays there.
    start, stop : int
        Addresses of memory in which no array may lie, save in its place: if one does, all are left.
    streamed_nbytes : int
        Arrays of this size and larger ones are copied past the caches.
    limit_nbytes : int
        Arrays of this size and larger ones are left.

    Returns
    -------
    list of int
        The numbers of those that were left: also None, and what is not contiguous in host memory, or of
        another dtype or number of elements than its place.
    """
    cdef vector[Copy] copies
    cdef Copy one
    cdef BufferView place, read
    cdef list left = [], views = []
    cdef size_t nbytes = 0
    if len(places) != len(arrays):
        raise ValueError(f"copy_plain(): {len(places)} places for {len(arrays)} arrays")
    for number in range(len(places)):
        if arrays[number] is places[number]:
            continue
        place, read = plain_view_of(places[number]), plain_view_of(arrays[number])
        if place is None or read is None or place.dtype != read.dtype or place.count != read.count:
            left.append(number)
        elif place.data == read.data or read.nbytes == 0:
            continue
        elif <uintptr_t> read.data < stop and <uintptr_t> read.data + read.nbytes > start:
            return list(range(len(places)))
        elif read.nbytes >= limit_nbytes or overlap(place, read) or not is_output(place):
            left.append(number)
        else:
            one.place, one.read, one.nbytes = place.data, read.data, read.nbytes
            copies.push_back(one)
            views += (place, read)
            nbytes += read.nbytes
    if nbytes < FEW_NBYTES:
        copy_all(copies, streamed_nbytes)
    else:
        with nogil:
            copy_all(copies, streamed_nbytes)
    return left


cdef struct Copy:
    void* place
    const void* read
    size_t nbytes


cdef void copy_all(vector[Copy]& copies, size_t streamed_nbytes) noexcept nogil:
    for one in copies:
        if one.nbytes >= streamed_nbytes:
            ferro.copy_past_caches(one.place, one.read, one.nbytes)
        else:
            memcpy(one.place, one.read, one.nbytes)


cdef BufferView plain_view_of(object array):
    """Return a view of what is contiguous in host memory; None of anything else."""
    cdef BufferView view
    if array is None:
        return None
    try:
        view = view_of(array)
    except (InvalidArray, TypeError):
        return None
    return view if view.device_type == CPU and view.is_contiguous else None


def begin_exit():
    """Say that this thread is about to end the interpreter: others must not come back to it."""
    ferro.begin_exit()


@cython.final
cdef class SymmetricMemory:
    """Bytes that every rank of the host can reach; exports the buffer protocol."""

    cdef shared_ptr[Heap] _heap
    cdef void* _data
    cdef Py_ssize_t _nbytes
    cdef int _num_forks

    def __init__(self):
        raise TypeError("SymmetricMemory is made by Communicator.allocate")

    def __dealloc__(self):
        if self._num_forks != num_forks:
            # The parent's: a thread that does not exist here may hold the heap's lock.
            new shared_ptr[Heap](move(self._heap))
        elif self._data != NULL:
            with nogil:  # another thread may hold the heap's lock for as long as backing takes
                self._heap.get().free(self._data)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._data, self._nbytes, False, flags)

    def __len__(self):
        return self._nbytes


@cython.final
cdef class HostWork:
    """An asynchronous call of the engine; see ferro_dist.work.Work."""

    cdef shared_ptr[Task] _task
    cdef Communicator _communicator
    cdef object _views     # keeps the arrays alive
    cdef object _written
    cdef object _like      # the array in whose library that is delivered; None if it is the caller's out

    def __init__(self):
        raise TypeError("HostWork is made by a call with async_op")

    def wait(self, timeout=None):
        cdef double seconds = UNLIMITED if timeout is None else arguments.check_wait_timeout(timeout)
        self._communicator._check_own()
        ferro.wait(self._communicator._engine, self._task, seconds)
        self._views = None
        self._communicator._in_flight.discard(self)
        try:
            self._task.get().rethrow()
        except DistributedError as error:
            self._communicator._failed(error)
            raise

    def is_completed(self):
        if self._task.get().is_done():
            return True
        self._communicator._check_own()  # a forked child would ask for ever
        return self._communicator._engine.get().is_done(self._task.get()[0])

    def result(self, timeout=None):
        self.wait(timeout)
        return delivered(self._communicator._arrays, self._written, self._like)

    @property
    def ended_s(self):
        """When a thread of the engine had done it, by time.perf_counter; None if that is not known."""
        cdef Task* task = self._task.get()
        if not task.is_done() or task.ended_ns == 0:
            return None
        return task.ended_ns * 1e-9  # one clock: CLOCK_MONOTONIC


@cython.final
cdef class HostLeg:
    """One collective of a GPU's arrays, on copies in the host's memory: see gpu_fallback.Run."""

    cdef Communicator _communicator
    cdef Collective _collective
    cdef double _deadline  # of all pieces together

    def __call__(self, size_t source, size_t target, size_t count):
        cdef Collective c = self._collective
        c.in_ = <const void*> source
        c.out = <void*> target if c.out != NULL else NULL
        if c.op in (Op.allreduce, Op.broadcast, Op.reduce):
            c.count = count  # of this piece
        self._communicator._run(&c, max(SHORTEST_TIMEOUT, self._deadline - monotonic()))


@cython.final
cdef class Communicator:
    """One rank's side of a group. Methods take the arguments of `Backend`'s methods, in the same order.

    `arrays` has the functions contiguous, allocate and deliver of ferro_dist.interop.
    """

    cdef shared_ptr[Engine] _engine
    cdef readonly int rank
    cdef readonly int world_size
    cdef public double timeout
    cdef object _arrays
    cdef object _first_error
    # Why ranks left, by rank, for all ranks of a group of threads; None where they are processes.
    # Let go by close(): tracebacks keep frames alive, and so the arrays of the rank that failed.
    cdef dict _reasons
    cdef object __weakref__
    cdef set _in_flight    # work whose arrays the engine may still use
    cdef size_t _calls_to_sweep  # after how many more calls those that are done are let go, beyond FEW
    cdef int _num_forks

    def __init__(self):
        raise TypeError("Communicator is made by create_group or connect")

    @staticmethod
    def create_group(int world_size, int num_cores, int peer_reads, double timeout, arrays):
        """All ranks of a group, for threads of this process."""
        cdef vector[shared_ptr[Engine]] engines = Engine.create_group(
            world_size, num_cores, <PeerReads> peer_reads
        )
        cdef Communicator communicator
        cdef dict reasons = {}
        cdef list group = []
        cdef int rank
        for rank in range(world_size):
            communicator = _wrap(engines[rank], rank, world_size, timeout, arrays)
            communicator._reasons = reasons
            group.append(communicator)
        return group

    @staticmethod
    def connect(
        int rank, int world_size, hosts, int segment_fd, collective_sockets, message_sockets,
        int num_colocated, int num_cores, int peer_reads, double timeout, arrays,
    ):
        """The rank of this process. Takes the sockets over; the segment's descriptor stays the caller's."""
        cdef Wiring wiring
        wiring.rank = rank
        wiring.world_size = world_size
        wiring.segment_fd = segment_fd
        wiring.num_colocated = num_colocated
        wiring.num_cores = num_cores
        wiring.peer_reads = <PeerReads> peer_reads
        wiring.collective_sockets = collective_sockets
        wiring.message_sockets = message_sockets
        wiring.hosts = hosts
        for host in hosts:
            if rank in host:
                wiring.local_ranks = sorted(host)
        cdef shared_ptr[Engine] engine
        with nogil:
            engine = Engine.connect(wiring)
        return _wrap(engine, rank, world_size, timeout, arrays)

    def __dealloc__(self):
        if self._num_forks != num_forks:
            # The parent's: its threads do not exist here, and cannot be joined.
            new shared_ptr[Engine](move(self._engine))
            return
        # Without the GIL: a thread that ends may wait for one that needs it.
        with nogil:
            self._engine.reset()

    def set_global_ranks(self, ranks):
        """Let errors name the group by its members' ranks in the one it was made from; before any call."""
        self._engine.get().set_global_ranks(ranks)

    @property
    def is_closed(self):
        return self._engine.get() == NULL or self._engine.get().is_closed()

    def close(self):
        """Leave the group; True if that is done, and no array is in use any more."""
        if self._num_forks == num_forks and not ferro.close(self._engine):
            return False
        self._let_go_of_all()
        return True

    def closer(self):
        """What closes the group without keeping this object, and so its arrays, alive."""
        cdef Closer closer = Closer.__new__(Closer)
        closer._engine = self._engine
        closer._communicator = weakref.ref(self)
        closer._num_forks = num_forks
        return closer

    def alarm(self):
        """A capsule of a ferro::Alarm, which tells an NcclGroup of the same ranks that one is gone."""
        return PyCapsule_New(new ferro.Alarm(ferro.alarm_of(self._engine)), "ferro::Alarm", _delete_alarm)

    # ---- What survivors must know to make a successor -------------------------

    def check_own(self):
        """Raise LockPoisoned in a process that was forked from the group's."""
        self._check_own()

    def lost_ranks(self):
        """The ranks that are certain to take part no more, ascending."""
        self._check_own()
        return self._engine.get().lost_ranks()

    def succession(self):
        """The word by which ranks of one host agree on who decides; 0 where none is shared."""
        return self._engine.get().succession()

    def advance_succession(self, uint32_t before, uint32_t after):
        """Set the word to `after` if it is `before`; return whether it was. True where none is shared."""
        return self._engine.get().advance_succession(before, after)

    def supersede(self):
        """End the group for the ranks that are still in it; this one goes on in a successor."""
        cdef shared_ptr[Engine] engine = self._engine
        with nogil:
            engine.get().supersede()

    def interrupt(self, error):
        """End the group on all ranks: `error` struck between calls that belong together."""
        cdef shared_ptr[Engine] engine = self._engine
        if self._num_forks == num_forks:
            with nogil:  # telling a peer that reads nothing takes a while
                engine.get().interrupt()
            self._note(error)

    def give_reason(self, error):
        """Let `error` be the cause of what the others raise when this rank has left, if they are threads."""
        if self._reasons is not None:
            self._reasons[self.rank] = error

    def allocate(self, Py_ssize_t nbytes):
        """Symmetric memory, or None where the group shares none."""
        self._check_usable()
        cdef shared_ptr[Heap] heap = self._engine.get().heap()
        if self.is_closed:  # asked last: a group that closes gives up its heap
            raise arguments.closed_error(rank=self.rank)
        if heap.get() == NULL:
            return None
        cdef SymmetricMemory memory = SymmetricMemory.__new__(SymmetricMemory)
        memory._num_forks = num_forks
        memory._heap = heap
        memory._nbytes = nbytes
        memory._data = ferro.allocate(memory._heap, memory._nbytes)
        return memory

    # ---- Collectives ----------------------------------------------------------

    def allreduce(self, x, out, reduce_op, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x)
        cdef object like = x if out is None else None
        cdef object written = self._new_like(x) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        self._check_outputs("allreduce", src, dst, src.count, 0)
        cdef Collective c = _collective(Op.allreduce, src, dst, src.count, tag)
        self._set_reduction(&c, "allreduce", src, reduce_op)
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    def broadcast(self, x, out, root, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x)
        cdef object like = x if out is None else None
        cdef object written = self._new_like(x) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        self._check_outputs("broadcast", src, dst, src.count, 0)
        cdef Collective c = _collective(Op.broadcast, src, dst, src.count, tag)
        c.root = self._root("broadcast", root)
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    def reduce(self, x, out, reduce_op, root, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x)
        cdef int root_rank = self._root("reduce", root)
        cdef BufferView dst = None
        cdef object like = x if out is None and root_rank == self.rank else None
        cdef object written = None
        if root_rank == self.rank:
            written = self._new_like(x) if out is None else out
            dst = output_of(written, x, src)
            self._check_outputs("reduce", src, dst, src.count, 0)
        cdef Collective c = _collective(Op.reduce, src, dst, src.count, tag)
        c.root = root_rank
        self._set_reduction(&c, "reduce", src, reduce_op)
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    def all_gather(self, x, out, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x)
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate_gathered(x, self.world_size) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        self._check_outputs("all_gather", src, dst, src.count * self.world_size,
                            -self.rank * <Py_ssize_t> src.nbytes)
        cdef Collective c = _collective(Op.all_gather, src, dst, src.count, tag)
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    def reduce_scatter(self, x, out, reduce_op, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x)
        cdef size_t count = self._chunk("reduce_scatter", "x", src)
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate_chunk(x, self.world_size) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        self._check_outputs("reduce_scatter", src, dst, count, self.rank * <Py_ssize_t> dst.nbytes)
        cdef Collective c = _collective(Op.reduce_scatter, src, dst, count, tag)
        self._set_reduction(&c, "reduce_scatter", src, reduce_op)
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    def all_to_all(self, x, out, send_counts, recv_counts, bint async_op, timeout, tag):
        if send_counts is not None or recv_counts is not None:
            return self._all_to_all_uneven(x, out, send_counts, recv_counts, async_op, timeout, tag)
        cdef BufferView src = self._input(x)
        cdef size_t count = self._chunk("all_to_all", "x", src)
        cdef object like = x if out is None else None
        cdef object written = self._new_like(x) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        self._check_outputs("all_to_all", src, dst, src.count, 0)
        cdef Collective c = _collective(Op.all_to_all, src, dst, count, tag)
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    def gather(self, x, out, root, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x)
        cdef int root_rank = self._root("gather", root)
        cdef BufferView dst = None
        cdef object like = x if out is None and root_rank == self.rank else None
        cdef object written = None
        if root_rank == self.rank:
            written = self._arrays.allocate_gathered(x, self.world_size) if out is None else out
            dst = output_of(written, x, src)
            self._check_outputs("gather", src, dst, src.count * self.world_size,
                                -self.rank * <Py_ssize_t> src.nbytes)
        cdef Collective c = _collective(Op.gather, src, dst, src.count, tag)
        c.root = root_rank
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    def scatter(self, x, out, root, bint async_op, timeout, tag):
        cdef BufferView src = None
        cdef BufferView dst
        cdef object like = None
        cdef Collective c
        c.op = Op.scatter
        c.root = self._root("scatter", root)
        if c.root == self.rank:
            if x is None:
                arguments.raise_missing_array(
                    "scatter", "x", "the root gives what is scattered", rank=self.rank)
            src = self._input(x)
            c.count = self._chunk("scatter", "x", src)
            c.in_ = src.data
            if out is None:
                like = x
                out = self._arrays.allocate_chunk(x, self.world_size)
        elif out is None:
            arguments.raise_missing_array(
                "scatter", "out", "only the root knows the shape otherwise", rank=self.rank)
        dst = output_view_of(out)
        if src is not None:
            self._check_outputs("scatter", src, dst, c.count, self.rank * <Py_ssize_t> dst.nbytes)
        c.dtype = <ferro.DType> dst.dtype
        c.count = dst.count
        c.out = dst.data
        c.tag = _tag(tag)
        return self._launch(&c, src, dst, out, like, async_op, timeout)

    def barrier(self, bint async_op, timeout, tag):
        cdef Collective c
        c.op = Op.barrier
        c.tag = _tag(tag)
        return self._launch(&c, None, None, None, None, async_op, timeout)

    def gather_for_split(self, x, timeout):
        cdef BufferView src = self._input(x)
        cdef object written = self._arrays.allocate_gathered(x, self.world_size)
        cdef Collective c = _collective(Op.split, src, output_view_of(written), src.count, NO_TAG)
        return self._launch(&c, src, output_view_of(written), written, x, False, timeout)

    def _all_to_all_uneven(self, x, out, send_counts, recv_counts, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x)
        counts = arguments.uneven_counts(
            send_counts, recv_counts, x_count=src.count, rank=self.rank, world_size=self.world_size)
        cdef vector[size_t] send = counts.send
        cdef vector[size_t] recv = counts.recv
        cdef object like = x if out is None else None
        cdef size_t expected = sum(counts.recv)
        cdef object written = self._arrays.allocate_rows(x, expected) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        self._check_outputs("all_to_all", src, dst, expected, NEVER_IN_PLACE)
        cdef Collective c = _collective(Op.all_to_all, src, dst, 0, tag)
        c.send_counts = send.data()
        c.recv_counts = recv.data()
        return self._launch(&c, src, dst, written, like, async_op, timeout)

    # ---- Messages -------------------------------------------------------------

    def send(self, x, dst, bint async_op, timeout, tag):
        cdef BufferView view = self._host_input(x, "send")
        cdef vector[PointToPoint] messages
        messages.push_back(self._message("send", True, dst, view, tag))
        return self._exchange(Op.send, messages, view, None, async_op, timeout)

    def recv(self, out, src, bint async_op, timeout, tag):
        cdef BufferView view = self._host_output(out, "recv")
        cdef vector[PointToPoint] messages
        messages.push_back(self._message("recv", False, src, view, tag))
        return self._exchange(Op.recv, messages, view, out, async_op, timeout)

    def sendrecv(self, x, out, dst, src, bint async_op, timeout, tag):
        cdef BufferView sent = self._host_input(x, "sendrecv")
        cdef BufferView received = self._host_output(out, "sendrecv")
        cdef vector[PointToPoint] messages
        messages.push_back(self._message("sendrecv", True, dst, sent, tag))
        messages.push_back(self._message("sendrecv", False, src, received, tag))
        if overlap(sent, received):
            arguments.raise_overlap("sendrecv", what="x and out overlap", rank=self.rank)
        return self._exchange(Op.sendrecv, messages, (sent, received), out, async_op, timeout)

    def batch(self, ops, bint async_op, timeout, tag):
        cdef vector[PointToPoint] messages
        cdef list views = []
        cdef BufferView view
        for op in ops:
            view = self._host_input(op.array, "batch") if op.is_send else self._host_output(op.array, "batch")
            messages.push_back(self._message("batch", op.is_send, op.peer, view, tag))
            views.append(view)
        arguments.check_disjoint(ops, views, rank=self.rank)
        return self._exchange(Op.batch, messages, views, None, async_op, timeout)

    # ---- Checks ---------------------------------------------------------------

    cdef BufferView _input(self, object array):
        cdef BufferView view = view_of(array)
        if not view.is_contiguous:
            view = view_of(self._arrays.contiguous(array))
        return view

    cdef BufferView _host_input(self, object array, str op):
        return self._check_host(self._input(array), op)

    cdef BufferView _host_output(self, object array, str op):
        return self._check_host(output_view_of(array), op)

    cdef BufferView _check_host(self, BufferView view, str op):
        if view.device_type != CPU:
            arguments.raise_out_of_reach(op, rank=self.rank)
        return view

    # `in_place` is how many bytes past the start of x an out that shares its memory has to begin,
    # or NEVER_IN_PLACE.
    cdef inline int _check_outputs(
        self, str op, BufferView src, BufferView dst, size_t count, Py_ssize_t in_place
    ) except -1:
        if dst.device_type != src.device_type or (
            dst.device_id != src.device_id and dst.device_id >= 0 and src.device_id >= 0
        ):
            arguments.raise_mixed_devices(op, rank=self.rank)
        if dst.dtype != src.dtype:
            arguments.check_out_dtype(
                op, DTYPE_NAMES[src.dtype], DTYPE_NAMES[dst.dtype], rank=self.rank)
        if dst.count != count:
            arguments.check_size(op, "out", dst.count, count, rank=self.rank)
        if (in_place == NEVER_IN_PLACE or dst.data != <char*> src.data + in_place) and overlap(src, dst):
            arguments.raise_overlap(op, rank=self.rank)
        return 0

    cdef inline int _set_reduction(self, Collective* c, str op, BufferView src, reduce_op) except -1:
        c.reduce_op = <ferro.ReduceOp> <int> reduce_op
        if ferro.reduce_kernel(c.dtype, c.reduce_op) == NULL:
            arguments.check_reduction(op, DTYPE_NAMES[src.dtype], reduce_op, rank=self.rank)
        return 0

    cdef inline int _root(self, str op, root) except -1:
        if type(root) is int and 0 <= root < self.world_size:
            return root
        return arguments.check_root(op, root, rank=self.rank, world_size=self.world_size)

    cdef inline size_t _chunk(self, str op, str name, BufferView view) except? 0:
        if view.count % self.world_size != 0:
            arguments.per_rank_count(op, name, view.count, rank=self.rank, world_size=self.world_size)
        return view.count // self.world_size

    cdef PointToPoint _message(self, str op, bint is_send, peer, BufferView view, tag) except *:
        cdef PointToPoint message
        if type(peer) is not int or not 0 <= peer < self.world_size or peer == self.rank:
            peer = arguments.check_peer(op, peer, rank=self.rank, world_size=self.world_size)
        message.is_send = is_send
        message.peer = peer
        message.data = view.data
        message.count = view.count
        message.dtype = <ferro.DType> view.dtype
        message.tag = _tag(tag)
        return message

    cdef inline int _check_usable(self) except -1:
        if self._first_error is not None or self._num_forks != num_forks:
            self._refuse()
        return 0

    cdef int _check_own(self) except -1:
        if self._num_forks != num_forks:
            raise LockPoisoned(
                "This group belongs to the parent process: a forked child cannot use it. "
                "Start the child with the spawn method, and make a group there.", rank=self.rank)
        return 0

    cdef int _refuse(self) except -1:
        self._check_own()
        first_error = copy.copy(self._first_error)  # of which the cause must not become a part
        self._explain(first_error)
        raise LockPoisoned(
            f"The group ended with an earlier error: {arguments.first_line(self._first_error)}\n"
            "Go on in the group that shrink() makes, or make a new one.",
            rank=self.rank, op=self._first_error.op, peer=self._first_error.peer,
            sequence=self._first_error.sequence) from first_error

    cdef inline double _seconds(self, timeout) except? -1:
        if timeout is None:
            return self.timeout
        if type(timeout) is float and timeout > 0:
            return timeout
        return arguments.check_timeout(timeout)

    # ---- Calls ----------------------------------------------------------------

    cdef object _launch(
        self, Collective* c, BufferView src, BufferView dst, object written, object like,
        bint async_op, timeout,
    ):
        self._check_usable()
        cdef double seconds = self._seconds(timeout)
        cdef HostWork work
        if (src is not None and src.device_type != CPU) or (dst is not None and dst.device_type != CPU):
            return self._detour(c, src, dst, written, like, async_op, seconds)
        if async_op:
            work = self._new_work((src, dst), written, like)
            try:
                work._task = self._engine.get().submit(c[0], seconds)
            except BaseException:
                self._in_flight.discard(work)
                raise
            return work
        self._let_go(0)
        self._run(c, seconds)
        return delivered(self._arrays, written, like)

    cdef inline int _run(self, Collective* c, double seconds) except -1:
        # The pointer need not be copied: close() keeps it, and the caller keeps this object.
        try:
            ferro.run(self._engine, c[0], seconds)
        except BaseException as error:
            self._failed(error)
            raise
        return 0

    # Moves a GPU's arrays by way of the host's memory; blocks even where it is asked not to.
    cdef object _detour(
        self, Collective* c, BufferView src, BufferView dst, object written, object like,
        bint async_op, double seconds,
    ):
        from ferro_dist import gpu_fallback
        from ferro_dist.work import CompletedWork

        gpu_fallback.check_enabled((<bytes> ferro.name_of(c.op)).decode(), self.rank)
        cdef HostLeg leg = HostLeg.__new__(HostLeg)
        leg._communicator = self
        leg._collective = c[0]
        leg._deadline = monotonic() + seconds
        cdef bint is_elementwise = c.op in (Op.allreduce, Op.broadcast, Op.reduce)
        cdef bint is_read = c.op != Op.broadcast or c.root == self.rank
        gpu_fallback.round_trip(src if is_read else None, dst, leg, is_elementwise=is_elementwise)
        result = delivered(self._arrays, written, like)
        return CompletedWork(result) if async_op else result

    cdef object _exchange(
        self, Op op, const vector[PointToPoint]& messages, object views, object result, bint async_op, timeout
    ):
        self._check_usable()
        cdef double seconds = self._seconds(timeout)
        cdef HostWork work
        if async_op:
            work = self._new_work(views, result, None)
            try:
                work._task = self._engine.get().submit(op, messages, seconds)
            except BaseException:
                self._in_flight.discard(work)
                raise
            return work
        self._let_go(0)
        try:
            ferro.exchange(self._engine, op, messages, seconds)
        except BaseException as error:
            self._failed(error)
            raise
        return result

    # The work is kept before it is submitted: if memory runs out after that, the engine must not be left
    # with arrays that nobody holds.
    cdef HostWork _new_work(self, object views, object written, object like):
        cdef HostWork work = HostWork.__new__(HostWork)
        work._communicator = self
        work._views = views
        work._written = written
        work._like = like
        self._let_go(FEW)
        self._in_flight.add(work)
        return work

    # Of work that is done, and for which nobody has waited. A sweep is due after as many calls as the one
    # before it left pieces, so that it costs each of them little; at once if there are only a `few`.
    cdef inline int _let_go(self, size_t few) except -1:
        cdef size_t num_in_flight = len(self._in_flight)
        if num_in_flight == 0:
            return 0
        if num_in_flight > few and self._calls_to_sweep > 0:
            self._calls_to_sweep -= 1
            return 0
        return self._sweep()

    # Once the engine uses no array any more.
    cdef int _let_go_of_all(self) except -1:
        self._in_flight.clear()
        self._reasons = None
        return 0

    cdef int _sweep(self) except -1:
        cdef Task* task
        for work in list(self._in_flight):
            task = (<HostWork> work)._task.get()
            # NULL if it is refused right now: other code may run while the error is put into words.
            if task != NULL and task.is_done():
                self._in_flight.discard(work)
        self._calls_to_sweep = len(self._in_flight)
        return 0

    # NumPy's are made here: the way through interop takes as long as a small collective.
    cdef inline object _new_like(self, object x):
        return empty(x.shape, x.dtype) if type(x) is ndarray else self._arrays.allocate(x)

    cdef int _failed(self, object error) except -1:
        self._note(error)
        self._explain(error)
        return 0

    # Nobody may see what another thread prints: its executor or future keeps the exception.
    cdef int _explain(self, object error) except -1:
        cdef dict reasons = self._reasons  # which close() in another thread takes away
        if reasons is not None and isinstance(error, ChannelClosed) and error.peer in reasons:
            arguments.attach_reason(error, reasons[error.peer])
        return 0

    cdef int _note(self, object error) except -1:
        if self._first_error is not None or self._engine.get().is_closed():
            return 0
        # The caller's mistakes leave the group as it was, and it never hears of what failed before anything
        # was sent.
        if isinstance(error, (SizeMismatch, UnsupportedOp)) or not self._engine.get().has_ended():
            return 0
        if isinstance(error, DistributedError):
            # A copy, without the traceback, whose frames would keep the caller's arrays and us alive.
            self._first_error = copy.copy(error)
        else:  # of who interrupts the group, of a signal handler, or MemoryError
            try:
                told = str(error)
            except Exception:  # what the exception itself may raise
                told = ""
            self._first_error = DistributedError(
                f"{type(error).__name__} inside a call of this group{': ' if told else '.'}{told}",
                rank=self.rank, peer=self.rank)
        return 0


cdef void _delete_alarm(object capsule) noexcept:
    cdef ferro.Alarm* alarm = <ferro.Alarm*> PyCapsule_GetPointer(capsule, "ferro::Alarm")
    del alarm


@cython.final
cdef class Closer:
    """Closes a group for a backend that nobody closed.

    The finalizer that waits for the backend to go holds this object. It must not hold the
    communicator: that holds the arrays under way, one of which may refer to the backend, which would
    then never go.
    """

    cdef shared_ptr[Engine] _engine
    cdef object _communicator  # weak
    cdef int _num_forks

    def __init__(self):
        raise TypeError("Closer is made by Communicator.closer")

    def __dealloc__(self):
        if self._num_forks != num_forks:
            new shared_ptr[Engine](move(self._engine))  # see Communicator
            return
        with nogil:
            self._engine.reset()

    def close(self):
        cdef Communicator communicator
        if self._num_forks == num_forks:
            ferro.close(self._engine)
        communicator = self._communicator()
        if communicator is not None:
            communicator._let_go_of_all()


cdef Communicator _wrap(shared_ptr[Engine] engine, int rank, int world_size, double timeout, object arrays):
    cdef Communicator communicator = Communicator.__new__(Communicator)
    communicator._engine = engine
    communicator.rank = rank
    communicator.world_size = world_size
    communicator.timeout = timeout
    communicator._arrays = arrays
    communicator._in_flight = set()
    communicator._num_forks = num_forks
    return communicator


cdef inline Collective _collective(
    Op op, BufferView src, BufferView dst, size_t count, tag
) except *:
    cdef Collective c
    c.op = op
    c.dtype = <ferro.DType> src.dtype
    c.count = count
    c.in_ = src.data
    c.out = dst.data if dst is not None else NULL
    c.tag = _tag(tag)
    return c


# Checked here, since Cython's conversion to uint32_t would silently take 1.5 for 1.
cdef inline uint32_t _tag(tag) except? MAX_TAG:
    if tag is NO_TAG:
        return 0
    if type(tag) is int and 0 <= tag <= 0xFFFFFFFF:
        return tag
    return arguments.check_tag(tag)
