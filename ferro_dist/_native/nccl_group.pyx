# A group over NCCL as Python sees it: the methods of a Backend, one call after the other.
#
# nccl_operation.pyx checks arguments and describes operations; csrc/nccl/lane.hpp orders streams.
# Here results are allocated, and arrays stay referenced until the GPU is done with them.

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uint64_t, uintptr_t
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

from ferro_dist._native cimport libnccl
from ferro_dist._native.buffer_view cimport (
    BufferView, delivered, NEVER_IN_PLACE, output_of, output_view_of, overlap, view_of,
)
from ferro_dist._native.cuda_stream cimport (
    current_stream, held_stream, known_stream, KnownStream, HeldStream,
)
from ferro_dist._native.libcudart cimport cudaStream_t
from ferro_dist._native.libnccl cimport Alarm, Lane, ncclRedOp_t, Op, Operation, Patience, Span
from ferro_dist._native.nccl cimport Communicator
from ferro_dist._native.nccl_connection cimport check_usable, Noting
from ferro_dist._native.nccl_error cimport who_is_missing
from ferro_dist._native.nccl_patience cimport is_interrupted, patience_of

from ferro_dist import arguments
from ferro_dist._native.cuda_memory import DeviceMemory
from ferro_dist._native.cuda_stream import Stream
from ferro_dist.errors import DistributedError, Timeout, UnsupportedOp
from ferro_dist.reduce_op import ReduceOp

__all__ = ["NcclGroup", "NcclWork", "attendance_nbytes"]

cdef object NO_TAG = 0  # the only 0 in the interpreter, so that `is` finds it
# Once calls have used so many bytes, CUDA is asked which of them are done, and their arrays are let go.
# To ask at each call costs more than a small array is worth; the watchdog's look frees the rest.
cdef size_t ENOUGH_NBYTES = 32 << 20
# The watchdog ends the group when a call's time is up, and says why, a moment later.
cdef double WATCHDOG_GRACE = 10  # seconds

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void*), void* argument) noexcept nogil


@cython.final
@cython.freelist(64)
cdef class NcclWork:
    """A call on the group's own stream; see ferro_dist.work.Work.

    `wait` makes the caller's stream wait, and blocks the host only with a `timeout`, or for a barrier.
    """

    cdef NcclGroup _group
    cdef uint64_t _ticket
    cdef BufferView _first      # keep the arrays alive, until the call is done
    cdef BufferView _second
    cdef object _others
    cdef object _written        # the result
    cdef object _like           # the array in whose library it is delivered; None if it is the caller's out
    cdef double _patience       # seconds that the host waits of itself; 0 where streams wait in its place

    def __init__(self):
        raise TypeError("NcclWork is made by a call with async_op")

    def wait(self, timeout=None):
        """Make the stream on which the caller works now wait for the call.

        With `timeout`, block the host for at most that many seconds until the call is done. The host is
        blocked for a barrier in any case.
        """
        check_usable(self._group._communicator)
        if timeout is not None or self._patience != 0:
            self._group._synchronize(
                self._ticket, self._patience if timeout is None else arguments.check_wait_timeout(timeout))
            return
        cdef vector[cudaStream_t] callers
        _add_stream(&callers, self._first)
        _add_stream(&callers, self._second)
        for view in self._others or ():
            _add_stream(&callers, view)
        try:  # not Noting: it takes longer than the call
            with nogil:
                self._group._lane.get().hand_back(
                    self._ticket, Span[cudaStream_t](callers.data(), callers.size()))
        except BaseException as error:
            self._group._communicator.note(error)
            raise

    def is_completed(self):
        cdef bint done = False
        if self._group._communicator._first_error is not None:
            return True
        check_usable(self._group._communicator)  # a forked child cannot ask CUDA
        with Noting(self._group._communicator), nogil:
            done = self._group._lane.get().is_done(self._ticket)
        return done

    def result(self, timeout=None):
        self.wait(timeout)
        return delivered(self._group._arrays, self._written, self._like)

    cdef int forget(self) except -1:
        """Let go of what the call used, now that it is done; the work may live on with its user."""
        self._first = None
        self._second = None
        self._others = None
        return 0


def attendance_nbytes(int num_members):
    """Return how much memory so many ranks need for `NcclGroup.attend`."""
    return libnccl.attendance_nbytes(num_members)


@cython.final
cdef class NcclGroup:
    """One rank's side of a group of GPUs. Methods take the arguments of `Backend`'s methods, in order.

    Parameters
    ----------
    communicator : Communicator
        The group's own from now on: `close` closes it.
    arrays : object
        Has the functions contiguous, allocate, allocate_gathered, allocate_chunk,
        allocate_rows and deliver of ferro_dist.interop.
    stream : stream, optional
        Where all calls work. If not given, those that are not asynchronous work on the caller's
        stream, and the others on one of the group's own.
    """

    cdef Communicator _communicator
    cdef shared_ptr[Lane] _lane  # its errors are the communicator's
    cdef readonly int rank
    cdef readonly int world_size
    cdef object _arrays
    cdef HeldStream _lent      # a stream that is not the group's own
    # What calls keep alive until they are done, two places for each call, in the order of their
    # tickets; and how many calls came before the first of them.
    cdef list _kept
    cdef uint64_t _num_let_go
    cdef size_t _unasked_nbytes  # that calls have used since CUDA was last asked which are done
    cdef object _scratch         # what barriers reduce
    cdef bint _is_closed
    cdef object __weakref__

    def __init__(self, Communicator communicator not None, arrays, stream=None):
        cdef cudaStream_t handle = NULL
        if stream is not None:
            self._lent = held_stream(stream)
            handle = self._lent.stream
        self._communicator = communicator
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self._arrays = arrays
        self._kept = []
        check_usable(communicator)
        with nogil:  # as in __dealloc__, for making streams and events
            self._lane = Lane.open(communicator._native, handle)

    def __dealloc__(self):
        with nogil:  # CUDA keeps whoever destroys an event waiting while another thread waits for room
            self._lane.reset()

    @property
    def communicator(self):
        return self._communicator

    @property
    def timeout(self):
        return self._communicator.timeout_s

    @timeout.setter
    def timeout(self, seconds):
        self._communicator.timeout = seconds

    @property
    def is_closed(self):
        return self._is_closed

    @property
    def stream(self):
        """The group's own stream; borrowed, valid while the group is."""
        return Stream.borrow(<size_t> self._lane.get().stream(), self._communicator.device)

    @property
    def num_in_flight(self):
        """How many calls still hold their arrays."""
        return len(self._kept) // 2

    def set_global_ranks(self, ranks):
        """Let errors name the group by its members' ranks in the one it was made from; before any call."""
        self._communicator.global_ranks = ranks

    def heed(self, alarm):
        """End the group when another one of the same ranks, whose `alarm` this is, loses a rank."""
        self._lane.get().heed((<Alarm*> PyCapsule_GetPointer(alarm, "ferro::Alarm"))[0])

    def attend(self, int fd, members):
        """Write down what this rank calls, for those ranks that share the memory behind `fd`.

        Errors then name who has not made a call. To be called before the first call.

        Parameters
        ----------
        fd : int
            Of `attendance_nbytes` zeros; stays the caller's.
        members : sequence of int
            The ranks that share it, this one too, in the same order on all of them.
        """
        self._lane.get().attend(fd, members)

    def synchronize(self, timeout=None):
        """Block until all calls made so far are done."""
        check_usable(self._communicator)
        if self._is_closed:
            raise arguments.closed_error("synchronize", rank=self.rank)
        self._synchronize(self._lane.get().num_launched(), self._patience(timeout))

    def leave(self):
        """Wait for what is under way, and tell the others that no call will follow. Idempotent.

        Those that share the attendance and wait for another call get `ChannelClosed`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._synchronize(self._lane.get().num_launched(), self._communicator.timeout_s)
        except DistributedError:
            pass  # then the communicator is aborted, which ends what is under way
        except BaseException:
            self._communicator.abort()  # Ctrl-C: whoever is impatient is not made to wait again
            raise
        finally:
            self._lane.get().leave(False)

    def close(self, timeout=None):
        """Leave the group, and end this side of it. Idempotent.

        In good health that takes until the other ranks close it too, at most `timeout` seconds,
        which default to the group's timeout.
        """
        try:
            self.leave()
        finally:
            self._communicator.close(timeout=timeout)
            self._kept.clear()
            _busy.discard(self)

    def abort(self):
        """Leave the group at once; what is under way ends. Idempotent."""
        self._is_closed = True
        self._lane.get().leave(True)
        self._communicator.abort()

    # ---- Collectives ----------------------------------------------------------

    def allreduce(self, x, out, reduce_op, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x, "allreduce")
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate(x) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        cdef Operation o
        self._communicator.describe_allreduce(&o, src, dst, reduce_op)
        return self._launch(&o, src, dst, written, like, async_op, timeout, tag)

    def broadcast(self, x, out, root, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x, "broadcast")
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate(x) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        cdef Operation o
        self._communicator.describe_broadcast(&o, src, dst, root)
        return self._launch(&o, src, dst, written, like, async_op, timeout, tag)

    def reduce(self, x, out, reduce_op, root, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x, "reduce")
        cdef bint is_root = self._communicator.root("reduce", root) == self.rank
        cdef object like = x if out is None and is_root else None
        cdef object written = self._arrays.allocate(x) if like is not None else out if is_root else None
        cdef BufferView dst = None if written is None else output_of(written, x, src)
        cdef Operation o
        self._communicator.describe_reduce(&o, src, dst, root, reduce_op)
        return self._launch(&o, src, dst, written, like, async_op, timeout, tag)

    def all_gather(self, x, out, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x, "all_gather")
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate_gathered(x, self.world_size) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        cdef Operation o
        self._communicator.describe_all_gather(&o, src, dst)
        return self._launch(&o, src, dst, written, like, async_op, timeout, tag)

    def reduce_scatter(self, x, out, reduce_op, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x, "reduce_scatter")
        self._communicator.chunk("reduce_scatter", src)
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate_chunk(x, self.world_size) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        cdef Operation o
        self._communicator.describe_reduce_scatter(&o, src, dst, reduce_op)
        return self._launch(&o, src, dst, written, like, async_op, timeout, tag)

    def all_to_all(self, x, out, send_counts, recv_counts, bint async_op, timeout, tag):
        if send_counts is not None or recv_counts is not None:
            return self._all_to_all_uneven(x, out, send_counts, recv_counts, async_op, timeout, tag)
        cdef BufferView src = self._input(x, "all_to_all")
        self._communicator.chunk("all_to_all", src)
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate(x) if out is None else out
        cdef BufferView dst = output_of(written, x, src)
        cdef Operation o
        if dst.data == src.data and dst.nbytes == src.nbytes and dst.dtype == src.dtype:
            src = self._copy_of(src, x)
        self._communicator.describe_all_to_all(&o, src, dst)
        return self._launch(&o, src, dst, written, like, async_op, timeout, tag)

    def gather(self, x, out, root, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x, "gather")
        cdef bint is_root = self._communicator.root("gather", root) == self.rank
        cdef object like = x if out is None and is_root else None
        cdef object written = None
        if is_root:
            written = self._arrays.allocate_gathered(x, self.world_size) if out is None else out
        cdef BufferView dst = None if written is None else output_of(written, x, src)
        cdef Operation o
        self._communicator.describe_gather(&o, src, dst, root)
        return self._launch(&o, src, dst, written, like, async_op, timeout, tag)

    def scatter(self, x, out, root, bint async_op, timeout, tag):
        cdef BufferView src = None
        cdef object like = None
        cdef Operation o
        if self._communicator.root("scatter", root) == self.rank:
            if x is None:
                arguments.raise_missing_array(
                    "scatter", "x", "the root gives what is scattered", rank=self.rank)
            src = self._input(x, "scatter")
            self._communicator.chunk("scatter", src)
            if out is None:
                like = x
                out = self._arrays.allocate_chunk(x, self.world_size)
        elif out is None:
            arguments.raise_missing_array(
                "scatter", "out", "only the root knows the shape otherwise", rank=self.rank)
        cdef BufferView dst = output_view_of(out)
        if src is None:  # else it is compared with x
            self._communicator.check_device(dst, "scatter")
        self._communicator.describe_scatter(&o, src, dst, root)
        return self._launch(&o, dst, src, out, like, async_op, timeout, tag)

    def barrier(self, bint async_op, timeout, tag):
        """Wait for all ranks, and for all earlier calls of this group on the GPU.

        Raises UnsupportedOp while a CUDA graph is captured on the group's own stream.
        """
        check_usable(self._communicator)
        self._refuse_captured_barrier()
        if self._scratch is None:
            self._scratch = DeviceMemory(1, self._communicator.device)
        cdef BufferView view = view_of(self._scratch)
        cdef Operation o
        self._communicator.describe_allreduce(&o, view, view, ReduceOp.SUM)
        cdef NcclWork work = self._launch_alone(&o, view, timeout, tag)
        work._patience = self._communicator.seconds(timeout) + WATCHDOG_GRACE
        if async_op:
            return work
        work.wait()
        return None

    # A captured call runs when its graph does: the host would wait for nothing, and the graph lack its end.
    cdef int _refuse_captured_barrier(self) except -1:
        cdef bint is_captured
        with nogil:
            is_captured = self._lane.get().is_captured()
        if is_captured:
            raise UnsupportedOp(
                "barrier: the group's stream is being captured into a CUDA graph, where the host cannot "
                "wait. Call it before the capture or after it.", op="barrier", rank=self.rank)
        return 0

    # An all_to_all in which every rank sends and receives its own counts.
    def _all_to_all_uneven(self, x, out, send_counts, recv_counts, bint async_op, timeout, tag):
        cdef BufferView src = self._input(x, "all_to_all")
        counts = arguments.uneven_counts(
            send_counts, recv_counts, x_count=src.count, rank=self.rank, world_size=self.world_size)
        cdef size_t expected = sum(counts.recv)
        cdef object like = x if out is None else None
        cdef object written = self._arrays.allocate_rows(x, expected) if out is None else out
        cdef BufferView dst = output_view_of(written)
        self._communicator.check_output("all_to_all", src, dst, expected, NEVER_IN_PLACE)
        cdef vector[Operation] operations
        cdef const char* sent = <const char*> src.data
        cdef char* received = <char*> dst.data
        cdef int peer
        for peer in range(self.world_size):
            self._add_part(&operations, True, peer, src, <void*> sent, counts.send[peer])
            self._add_part(&operations, False, peer, dst, received, counts.recv[peer])
            sent += <size_t> counts.send[peer] * src.itemsize
            received += <size_t> counts.recv[peer] * src.itemsize
        return self._launch_all(operations, src, dst, None, written, like, async_op, timeout, tag)

    # NCCL's all_to_all cannot work in place: the parts go through a copy.
    cdef BufferView _copy_of(self, BufferView view, array):
        if view.count == 0:
            return view
        self._communicator.check_device(view, "all_to_all")
        return self._communicator.input(self._arrays.copy(array), "all_to_all")

    cdef int _add_part(
        self, vector[Operation]* operations, bint is_send, int peer, BufferView view, void* data,
        size_t count,
    ) except -1:
        cdef Operation o
        if count == 0:
            return 0
        o.op = Op.send if is_send else Op.recv
        o.peer = peer
        o.in_ = data
        o.out = data
        self._communicator.set_elements(&o, "all_to_all", view, count)
        operations.push_back(o)
        return 0

    # ---- Messages -------------------------------------------------------------

    def send(self, x, dst, bint async_op, timeout, tag):
        cdef BufferView view = self._input(x, "send")
        cdef Operation o
        self._communicator.describe_send(&o, view, dst)
        return self._launch(&o, view, None, None, None, async_op, timeout, tag)

    def recv(self, out, src, bint async_op, timeout, tag):
        cdef BufferView view = self._communicator.output(out, "recv")
        cdef Operation o
        self._communicator.describe_recv(&o, view, src)
        return self._launch(&o, view, None, out, None, async_op, timeout, tag)

    def sendrecv(self, x, out, dst, src, bint async_op, timeout, tag):
        cdef BufferView sent = self._input(x, "sendrecv")
        cdef BufferView received = self._communicator.output(out, "sendrecv")
        cdef vector[Operation] operations
        operations.resize(2)
        self._communicator.describe_send(&operations[0], sent, dst)
        self._communicator.describe_recv(&operations[1], received, src)
        if overlap(sent, received):
            arguments.raise_overlap("sendrecv", what="x and out overlap", rank=self.rank)
        return self._launch_all(operations, sent, received, None, out, None, async_op, timeout, tag)

    def batch(self, ops, bint async_op, timeout, tag):
        cdef vector[Operation] operations
        cdef list views = []
        self._describe_batch(&operations, views, ops)
        return self._launch_all(operations, None, None, views, None, None, async_op, timeout, tag)

    def check_batch(self, ops, timeout, tag):
        """Raise what `batch` would raise for its arguments; launch nothing."""
        cdef vector[Operation] operations
        self._describe_batch(&operations, [], ops)
        self._check_call(timeout, tag)

    cdef int _describe_batch(self, vector[Operation]* operations, list views, ops) except -1:
        cdef Operation o
        cdef BufferView view
        for op in ops:
            if op.is_send:
                view = self._input(op.array, "batch")
                self._communicator.describe_send(&o, view, op.peer)
            else:
                view = self._communicator.output(op.array, "batch")
                self._communicator.describe_recv(&o, view, op.peer)
            operations.push_back(o)
            views.append(view)
        arguments.check_disjoint(ops, views, rank=self.rank)
        return 0

    # ---- Raw pointers, which wait for no caller's stream, and none for them ------

    def allreduce_raw(self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int op):
        cdef Operation o
        self._communicator.describe_raw(&o, Op.allreduce, "allreduce", sendbuf, recvbuf, count, dtype)
        o.reduce_op = <ncclRedOp_t> op
        self._launch_alone(&o, None, None, NO_TAG)

    def broadcast_raw(self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, root):
        cdef Operation o
        self._communicator.describe_raw(&o, Op.broadcast, "broadcast", sendbuf, recvbuf, count, dtype)
        o.peer = self._communicator.root("broadcast", root)
        self._launch_alone(&o, None, None, NO_TAG)

    def all_gather_raw(self, uintptr_t sendbuf, uintptr_t recvbuf, size_t sendcount, int dtype):
        cdef Operation o
        self._communicator.describe_raw(&o, Op.all_gather, "all_gather", sendbuf, recvbuf, sendcount, dtype)
        self._launch_alone(&o, None, None, NO_TAG)

    def reduce_scatter_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t recvcount, int dtype, int op
    ):
        cdef Operation o
        self._communicator.describe_raw(
            &o, Op.reduce_scatter, "reduce_scatter", sendbuf, recvbuf, recvcount, dtype)
        o.reduce_op = <ncclRedOp_t> op
        self._launch_alone(&o, None, None, NO_TAG)

    # ---- Calls ----------------------------------------------------------------

    cdef BufferView _input(self, object array, str op):
        cdef BufferView view = view_of(array)
        if not view.is_contiguous:
            view = view_of(self._arrays.contiguous(array))
        self._communicator.check_device(view, op)
        return view

    # Arrays of two libraries may be worked on in two streams: both have to be put in order.
    cdef object _launch(
        self, Operation* o, BufferView first, BufferView second, object written, object like,
        bint async_op, timeout, tag,
    ):
        cdef cudaStream_t[2] callers
        cdef size_t num_callers = 1
        cdef KnownStream known = KnownStream(NULL, -1, NULL)
        callers[0] = known_stream(first, &known)
        if second is not None and second is not first:
            callers[1] = known_stream(second, &known)
            num_callers += callers[1] != callers[0]
        return self._launch_on(
            Span[Operation](o, 1), Span[cudaStream_t](callers, num_callers), first, second, None, written,
            like, async_op, timeout, tag)

    cdef object _launch_all(
        self, vector[Operation]& operations, BufferView first, BufferView second, object others,
        object written, object like, bint async_op, timeout, tag,
    ):
        cdef vector[cudaStream_t] callers
        _add_stream(&callers, first)
        _add_stream(&callers, second)
        for view in others or ():
            _add_stream(&callers, view)
        return self._launch_on(
            Span[Operation](operations.data(), operations.size()),
            Span[cudaStream_t](callers.data(), callers.size()), first, second, others, written, like,
            async_op, timeout, tag)

    cdef NcclWork _launch_alone(self, const Operation* o, BufferView view, timeout, tag):
        """Launch what is in order with the group's own stream alone."""
        cdef cudaStream_t own = self._lane.get().stream()
        return self._launch_on(
            Span[Operation](o, 1), Span[cudaStream_t](&own, 1), view, None, None, None, None, True,
            timeout, tag)

    cdef object _launch_on(
        self, Span[Operation] operations, Span[cudaStream_t] callers, BufferView first, BufferView second,
        object others, object written, object like, bint async_op, timeout, tag,
    ):
        cdef double seconds = self._check_call(timeout, tag)
        cdef uint64_t ticket = 0
        if operations.size() != 0:
            try:
                ticket = self._call(operations, callers, async_op, seconds)
            except BaseException as error:  # not Noting: it takes longer than the call
                self._communicator.note_of_call(error, (first, second, others))
                raise
        if not async_op:
            if ticket != 0:
                self._keep(ticket, first, others if second is None else second)
            return delivered(self._arrays, written, like)
        cdef NcclWork work = NcclWork.__new__(NcclWork)
        work._group = self
        work._ticket = ticket
        work._first = first
        work._second = second
        work._others = others
        work._written = written
        work._like = like
        if ticket != 0:
            self._keep(ticket, first, work)
        return work

    cdef inline double _check_call(self, timeout, tag) except? -1:
        """Check the tag, and that a call can be made; return the call's timeout in seconds."""
        check_usable(self._communicator)
        if tag is not NO_TAG and (type(tag) is not int or not 0 <= tag <= 0xFFFFFFFF):
            arguments.check_tag(tag)
        return self._communicator.seconds(timeout)

    cdef uint64_t _call(
        self, Span[Operation] operations, Span[cudaStream_t] callers, bint async_op, double seconds
    ) except? 0:
        """Launch, and return the call's ticket; 0 where it became part of a CUDA graph."""
        cdef Patience patience = Patience(seconds, is_interrupted, NULL)
        with nogil:
            return self._lane.get().launch(operations, callers, async_op, seconds, patience)

    # Dropping an array may run code of its library, or let other threads run, which make calls and
    # drop arrays themselves. So the list is put right first, and arrays are dropped after that.

    cdef int _keep(self, uint64_t ticket, BufferView first, object second) except -1:
        """Keep the arrays of a call until it is done, and let go of those of calls that are."""
        cdef Py_ssize_t place = <Py_ssize_t> (2 * (ticket - self._num_let_go - 1))
        if ticket > self._num_let_go:
            if not self._kept:
                _busy.add(self)
            # Another thread's call may have come before this one while its arrays come later.
            while len(self._kept) < place:
                self._kept.append(None)
            if len(self._kept) == place:
                self._kept.append(first)
                self._kept.append(second)
            else:
                self._kept[place] = first
                self._kept[place + 1] = second
        elif type(second) is NcclWork:  # done already, and another thread has let go of calls up to it
            (<NcclWork> second).forget()
        if first is not None:
            self._unasked_nbytes += first.nbytes
            if self._unasked_nbytes >= ENOUGH_NBYTES:
                self._unasked_nbytes = 0
                with Noting(self._communicator), nogil:
                    self._lane.get().look_for_done()
        return self._let_go()

    cdef int _let_go(self) except -1:
        """Forget the arrays of calls that are known to be done, which are the oldest."""
        cdef uint64_t num_done = self._lane.get().num_seen_done()
        if num_done <= self._num_let_go:
            return 0
        cdef Py_ssize_t finished = <Py_ssize_t> (2 * (num_done - self._num_let_go))
        cdef list done = self._kept[:finished]
        del self._kept[:finished]
        self._num_let_go = num_done
        if not self._kept:
            _busy.discard(self)
        for kept in done:
            if type(kept) is NcclWork:
                (<NcclWork> kept).forget()
        return 0

    cdef int _synchronize(self, uint64_t ticket, double seconds) except -1:
        cdef Patience patience = patience_of(seconds)
        try:
            with Noting(self._communicator), nogil:
                self._lane.get().synchronize(ticket, patience)
        except Timeout as error:
            if error.op is not None:  # of the call itself, which has ended the group
                raise
            awaited = f": {who_is_missing(error.missing)}" if error.missing else ""
            late = Timeout(
                f"The call is still under way after {seconds:g} s{awaited}. It goes on; wait again.",
                missing=error.missing, seconds=seconds, rank=self.rank)
            arguments.name_group(late, self._communicator)
            raise late from None
        return self._let_go()

    cdef inline double _patience(self, timeout) except? -1:
        if timeout is None:
            return self._communicator.timeout_s + WATCHDOG_GRACE
        return self._communicator.seconds(timeout)


cdef int _add_stream(vector[cudaStream_t]* streams, BufferView view) except -1:
    """Add the stream on which the array's library works now, unless it is there."""
    cdef cudaStream_t stream
    cdef size_t i
    if view is None:
        return 0
    stream = current_stream(view)
    for i in range(streams.size()):
        if streams[0][i] == stream:
            return 0
    streams.push_back(stream)
    return 0


# ---- Arrays of groups that make no more calls ------------------------------------------

# Groups with work in flight. Held here, so that the collector does not take a group that nobody
# refers to any more, and with it arrays that the GPU still uses.
cdef set _busy = set()


cdef int _let_all_go(void* unused) noexcept with gil:
    cdef NcclGroup group
    for group in list(_busy):
        group._let_go()
    return 0


cdef void _ask_for_letting_go() noexcept nogil:
    """On the watchdog's thread, which has no interpreter: let the main thread do it soon.

    That is, once it next takes the GIL: before Python 3.12 a thread that never lets go of it
    does not hear of pending calls.
    """
    Py_AddPendingCall(_let_all_go, NULL)


libnccl.on_done(_ask_for_letting_go)
