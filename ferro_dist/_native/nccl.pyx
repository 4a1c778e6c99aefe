# NCCL as Python sees it: check, convert, let go of the GIL, call once, translate.
#
# This is the binding: operations go on the stream that the caller names, and the caller keeps
# arrays alive and streams open. Order and lifetime are the business of nccl_group.pyx. This module
# stands on
#   nccl_library.pyx     the library itself, identifiers, configurations
#   nccl_operation.pyx   what can be asked of NCCL, and the arguments' checks
#   nccl_connection.pyx  a communicator's state and its end
#   nccl_resource.pyx    what NCCL keeps for a communicator

import os
from collections.abc import Iterable

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.limits cimport INT_MAX, INT_MIN
from libc.stdint cimport uintptr_t
from libcpp.vector cimport vector

from ferro_dist._native cimport nccl_library
from ferro_dist._native.buffer_view cimport BufferView, output_of
from ferro_dist._native.cuda_runtime cimport cudart
from ferro_dist._native.cuda_stream cimport known_stream, KnownStream, stream_handle
from ferro_dist._native.libcudart cimport Cudart, cudaStream_t, cudaStreamPerThread
from ferro_dist._native.libnccl cimport (
    Alarm, are_apart, current_group, GroupedOperation, launch_group, Native, NCCL_CONFIG_UNDEF_INT,
    ncclConfig_t, ncclRedOp_t, NCCL_SHRINK_ABORT, NCCL_SHRINK_DEFAULT, NCCL_SPLIT_NOCOLOR,
    ncclUniqueId, NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_DEFAULT, Op, Operation, Patience,
)
from ferro_dist._native.nccl_connection cimport check_usable, Connection, Noting
from ferro_dist._native.nccl_library cimport config_of
from ferro_dist._native.nccl_operation cimport Member
from ferro_dist._native.nccl_patience cimport is_interrupted, patience_of
from ferro_dist._native.nccl_resource cimport (
    check_in_window, make_premul_sum, make_registration, make_window, PreMulSum, Resource, Window,
)

from ferro_dist import arguments
from ferro_dist._native.cuda_runtime import device_number
from ferro_dist._native.nccl_library import get_last_error, get_unique_id, get_version, UniqueId
from ferro_dist._native.nccl_operation import dtype_to_nccl, reduce_op_to_nccl
from ferro_dist.errors import InvalidArray, InvalidRank, InvalidWorldSize, SelfSend, UnsupportedOp
from ferro_dist.reduce_op import ReduceOp

__all__ = [
    "Communicator", "Group", "UniqueId", "dtype_to_nccl", "get_last_error", "get_unique_id",
    "get_version", "reduce_op_to_nccl",
]

cdef double DEFAULT_TIMEOUT = 300  # seconds
cdef size_t TYPICAL_SIZE = 128  # operations of a group, which allocates only once up to there


@cython.final
cdef class Communicator(Connection):
    """One rank's place in a set of GPUs that NCCL connects.

    Made by `init_rank`, `join`, `split`, `shrink` and `grow`. All methods may be called from
    any thread; calls on one device take turns. Every blocking method takes `timeout` in
    seconds, None for the communicator's own.

    Collectives and messages put their work on `stream` and return. **The caller keeps arrays
    alive until the stream has passed the work.**

    Those on arrays take `x` and `out` of any shape, C-contiguous, of one dtype, on this
    communicator's GPU, and count their elements. For `stream`, None means the one on which
    the arrays' library works now. Ranks that disagree on sizes hang, or get wrong results: NCCL
    compares nothing. These methods raise, before anything is launched:

    - `InvalidArray` for another device, layout or dtype, and for an `out` that overlaps `x` but not
      in place: where it begins with `x`; for all_gather and gather, where `x` is this rank's part
      of `out`; for reduce_scatter and scatter, the other way round;
    - `SizeMismatch`, `InvalidRank` and `SelfSend` for sizes, roots and peers;
    - `UnsupportedOp` for an array in host memory, for what NCCL cannot reduce, and for CUDA's default
      stream of a thread (``cudaStreamPerThread``), unless the communicator blocks.

    Methods whose names end in ``_raw`` take device pointers and the stream's address as
    integers, counts in elements, NCCL's number of the dtype (`dtype_to_nccl`) and of the
    reduction (`reduce_op_to_nccl`). They check roots, peers, dtypes, and that some memory
    could hold `count`. Pointers and reductions they take on trust: one that NCCL refuses ends
    the communicator, unless that blocks.

    All raise the first error, as the cause of a `LockPoisoned`, once the communicator has
    failed, and `ChannelClosed` once it has been closed.
    """

    def __init__(self):
        raise TypeError("A Communicator is made by Communicator.init_rank")

    @staticmethod
    def init_rank(
        world_size, unique_ids, rank, *, device=None, timeout=DEFAULT_TIMEOUT, alarm=None, **config,
    ):
        """Connect with the other ranks, all of which make this call.

        Parameters
        ----------
        world_size : int
        unique_ids : UniqueId or sequence of UniqueId
            From `get_unique_id`; the same on every rank, in the same order. Several spread the
            work of a large start (NCCL 2.23).
        rank : int
            From 0 to ``world_size - 1``, a different one on each.
        device : int, optional
            The current device if not given.
        timeout : float
            Seconds, for this call and for later ones that name none.
        alarm : object, optional
            From ``alarm()`` of a host group of the same ranks: if that loses a rank, this call ends.
        **config
            Options of NCCL, by the names in ``nccl_library.CONFIG_OPTIONS``: integers, and texts
            for ``net_name`` and ``comm_name``. With ``blocking=True`` NCCL blocks in its own calls,
            and timeouts cannot hold. With ``split_share=True`` those that are split from this one
            take turns with it, and an abort of one is that of all; `revoke` and a `shrink` with
            `abort` fail the others, whose work they stop.

        Raises
        ------
        Timeout
            Not all ranks came.
        PeerLostError, ChannelClosed
            `alarm` has told that a rank died, or has ended that group.
        BackendUnavailable
            The NCCL that is loaded has no such option, or there is no such GPU.
        InvalidRank, InvalidWorldSize
            `rank` and `world_size` do not name a place in a communicator.
        DistributedError
            NCCL refuses the options, or the ranks disagree.
        """
        return _connected(False, world_size, _ids_of(unique_ids), rank, device, timeout, alarm, config)

    @staticmethod
    def join(
        world_size, nccl_library.UniqueId unique_id not None, rank, *, device=None,
        timeout=DEFAULT_TIMEOUT, **config,
    ):
        """Become the new rank `rank` of a communicator whose ranks call `grow` now (NCCL 2.29.2).

        Parameters
        ----------
        world_size : int
            That of the communicator that grows, afterwards.
        unique_id : UniqueId
            From ``unique_id()`` of that communicator.
        rank, device, timeout, **config
            As `init_rank` takes them, and with its errors.
        """
        return _connected(True, world_size, _ids_of(unique_id), rank, device, timeout, None, config)

    # ---- More communicators out of this one ------------------------------------

    def split(self, color, key, *, timeout=None, **config):
        """Make a communicator of the ranks that name the same `color`, ordered by `key`.

        Called by all ranks.

        Parameters
        ----------
        color : int or None
            At least 0. A rank that names None gets None.
        key : int
            Ranks with equal keys keep their order in this communicator.
        timeout : float, optional
            Seconds. A `Timeout` ends this communicator, too.
        **config
            As `init_rank` takes them; what is not given takes NCCL's default, not the value that it has
            here.
        """
        cdef int native_color = NCCL_SPLIT_NOCOLOR if color is None else _number("split", "color", color, 0)
        cdef int native_key = _number("split", "key", key, INT_MIN)
        cdef ncclConfig_t native_config = config_of(config)
        cdef Patience patience = self.patience(timeout)
        cdef Communicator made = Communicator.__new__(Communicator)
        with Noting(self), nogil:
            made._native = self._native.get().split(native_color, native_key, native_config, patience)
        if made._native.get() == NULL:
            return None
        return made.adopted(self.timeout_s, native_config)

    def shrink(self, excluded, *, bint abort=False, timeout=None, **config):
        """Make a communicator without the ranks `excluded`, called by all others (NCCL 2.27).

        Parameters
        ----------
        excluded : iterable of int
            At least one; the same on all ranks that call. The others keep their order.
        abort : bool
            Whether work under way on this communicator is ended first, as is needed where it
            waits for ranks that are excluded.
        timeout, **config
            As `split` takes them.

        Raises
        ------
        InvalidRank
            `excluded` names no ranks of this communicator, or this rank.
        """
        cdef vector[int] ranks = self._others_of(excluded)
        cdef int flags = NCCL_SHRINK_ABORT if abort else NCCL_SHRINK_DEFAULT
        cdef ncclConfig_t native_config = config_of(config)
        cdef Patience patience = self.patience(timeout)
        cdef Communicator made = Communicator.__new__(Communicator)
        with Noting(self), nogil:
            made._native = self._native.get().shrink(ranks, flags, native_config, patience)
        return made.adopted(self.timeout_s, native_config)

    def grow(self, world_size, nccl_library.UniqueId unique_id=None, *, timeout=None, **config):
        """Make a communicator of `world_size` ranks, of which those from `self.world_size` on are new.

        Called by all ranks while the new ones call `join` (NCCL 2.29.2). One rank passes the
        `unique_id` that its `unique_id()` made and that the new ranks use. `timeout` and
        `config` are as `split` takes them. Raises InvalidWorldSize unless there are new ranks.
        """
        cdef int num_ranks = arguments.check_world_size(world_size)
        cdef const ncclUniqueId* native_id = NULL
        if num_ranks <= self.world_size:
            raise InvalidWorldSize(
                f"grow: world_size must be more than the {self.world_size} of this communicator, and is "
                f"{num_ranks}.", op="grow", rank=self.rank)
        if unique_id is not None:
            native_id = &unique_id._id
        cdef ncclConfig_t native_config = config_of(config)
        cdef Patience patience = self.patience(timeout)
        cdef Communicator made = Communicator.__new__(Communicator)
        with Noting(self), nogil:
            made._native = self._native.get().grow(num_ranks, native_id, native_config, patience)
        return made.adopted(self.timeout_s, native_config)

    def unique_id(self, *, timeout=None):
        """Make the identifier with which new ranks `join` when this communicator grows.

        Once for each `grow`, with no `split` in between: NCCL takes it for the next communicator that is
        made of this one.
        """
        cdef nccl_library.UniqueId unique_id = nccl_library.UniqueId.__new__(nccl_library.UniqueId)
        cdef Patience patience = self.patience(timeout)
        with Noting(self), nogil:
            unique_id._id = self._native.get().unique_id(patience)
        return unique_id

    cdef vector[int] _others_of(self, ranks) except *:
        """Return the ranks in ascending order, each once, at least one; this one is not among them."""
        if not isinstance(ranks, Iterable):
            raise TypeError(f"shrink: excluded must be the ranks to leave out, not {ranks!r:.50}.")
        cdef set others = set(ranks)
        if not others:
            raise InvalidRank(
                "shrink: no rank is excluded. Name at least one.", op="shrink", rank=self.rank)
        if self.rank in others:
            raise InvalidRank(
                f"shrink: rank {self.rank} excludes itself. Those that are excluded do not make the call.",
                op="shrink", rank=self.rank)
        return sorted({self.peer("shrink", other) for other in others})

    cdef Communicator adopted(self, double timeout, const ncclConfig_t& config):
        self.adopt(timeout, _is_in_force(config.blocking))
        self._num_signals = _or_one(config.numRmaSig)
        self._num_contexts = _or_one(config.numRmaCtx)
        forced = os.environ.get("NCCL_NUM_RMA_CTX", "")
        if forced.isdecimal():
            self._num_contexts = int(forced)
        return self

    # ---- Collectives on raw pointers --------------------------------------------

    def allreduce_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int op, stream
    ):
        """Reduce `count` elements of every rank's `sendbuf` into `recvbuf` of all, which may be the same."""
        cdef Operation o
        self.describe_raw(&o, Op.allreduce, "allreduce", sendbuf, recvbuf, count, dtype)
        o.reduce_op = <ncclRedOp_t> op
        self._launch_on(&o, stream)

    def broadcast_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, root, stream
    ):
        """Copy `count` elements of the root's `sendbuf` into `recvbuf` of all."""
        cdef Operation o
        self.describe_raw(&o, Op.broadcast, "broadcast", sendbuf, recvbuf, count, dtype)
        o.peer = self.root("broadcast", root)
        self._launch_on(&o, stream)

    def reduce_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, int op, root, stream
    ):
        """Reduce `count` elements of every rank's `sendbuf` into the root's `recvbuf`."""
        cdef Operation o
        self.describe_raw(&o, Op.reduce, "reduce", sendbuf, recvbuf, count, dtype)
        o.reduce_op = <ncclRedOp_t> op
        o.peer = self.root("reduce", root)
        self._launch_on(&o, stream)

    def all_gather_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t sendcount, int dtype, stream
    ):
        """Copy `sendcount` elements of every rank into `recvbuf` of all, in the order of ranks."""
        cdef Operation o
        self.describe_raw(&o, Op.all_gather, "all_gather", sendbuf, recvbuf, sendcount, dtype)
        self._launch_on(&o, stream)

    def reduce_scatter_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t recvcount, int dtype, int op, stream
    ):
        """Reduce ``world_size * recvcount`` elements; each rank keeps its own part."""
        cdef Operation o
        self.describe_raw(&o, Op.reduce_scatter, "reduce_scatter", sendbuf, recvbuf, recvcount, dtype)
        o.reduce_op = <ncclRedOp_t> op
        self._launch_on(&o, stream)

    def all_to_all_raw(self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, stream):
        """Send `count` elements to each rank, and receive as many from each."""
        cdef Operation o
        self.describe_raw(&o, Op.all_to_all, "all_to_all", sendbuf, recvbuf, count, dtype)
        self._launch_on(&o, stream)

    def gather_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, root, stream
    ):
        """Copy `count` elements of every rank into the root's `recvbuf`, in the order of ranks."""
        cdef Operation o
        self.describe_raw(&o, Op.gather, "gather", sendbuf, recvbuf, count, dtype)
        o.peer = self.root("gather", root)
        self._launch_on(&o, stream)

    def scatter_raw(
        self, uintptr_t sendbuf, uintptr_t recvbuf, size_t count, int dtype, root, stream
    ):
        """Copy `count` elements of the root's `sendbuf` to each rank, in the order of ranks."""
        cdef Operation o
        self.describe_raw(&o, Op.scatter, "scatter", sendbuf, recvbuf, count, dtype)
        o.peer = self.root("scatter", root)
        self._launch_on(&o, stream)

    def send_raw(self, uintptr_t sendbuf, size_t count, int dtype, peer, stream):
        """Send `count` elements to rank `peer`."""
        cdef Operation o
        self.describe_raw(&o, Op.send, "send", sendbuf, 0, count, dtype)
        o.peer = self._raw_peer("send", peer)
        self._launch_on(&o, stream)

    def recv_raw(self, uintptr_t recvbuf, size_t count, int dtype, peer, stream):
        """Receive `count` elements from rank `peer`."""
        cdef Operation o
        self.describe_raw(&o, Op.recv, "recv", 0, recvbuf, count, dtype)
        o.peer = self._raw_peer("recv", peer)
        self._launch_on(&o, stream)

    cdef int _raw_peer(self, str op, peer) except -1:
        # Within a group a rank may send to itself, and receive that.
        if current_group() != NULL and peer == self.rank:
            return self.rank
        return self.peer(op, peer)

    # ---- Collectives on arrays --------------------------------------------------

    def allreduce(self, x, out, op=ReduceOp.SUM, *, stream=None):
        """Reduce `x` over all ranks into `out` of as many elements, which may be `x`.

        `op` is a `ReduceOp`, its name, or a `PreMulSum` of this communicator.
        """
        cdef BufferView src = self.input(x, "allreduce")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_allreduce(&o, src, dst, op)
        self._issue(&o, src, dst, stream)

    def broadcast(self, x, out, root, *, stream=None):
        """Copy `x` of `root` into `out` of every rank, which may be `x`; all have as many elements."""
        cdef BufferView src = self.input(x, "broadcast")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_broadcast(&o, src, dst, root)
        self._issue(&o, src, dst, stream)

    def reduce(self, x, out, root, op=ReduceOp.SUM, *, stream=None):
        """Reduce `x` over all ranks into `out` of `root`, which has as many elements; None elsewhere.

        `op` is as `allreduce` takes it.
        """
        cdef BufferView src = self.input(x, "reduce")
        cdef BufferView dst = None if out is None else output_of(out, x, src)
        cdef Operation o
        self.describe_reduce(&o, src, dst, root, op)
        self._issue(&o, src, dst, stream)

    def all_gather(self, x, out, *, stream=None):
        """Copy every rank's `x` into `out` of all, in rank order: ``world_size`` times as many elements."""
        cdef BufferView src = self.input(x, "all_gather")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_all_gather(&o, src, dst)
        self._issue(&o, src, dst, stream)

    def reduce_scatter(self, x, out, op=ReduceOp.SUM, *, stream=None):
        """Reduce `x` over all ranks; each keeps the part of its rank in `out`, a ``world_size``-th.

        `op` is as `allreduce` takes it.
        """
        cdef BufferView src = self.input(x, "reduce_scatter")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_reduce_scatter(&o, src, dst, op)
        self._issue(&o, src, dst, stream)

    def all_to_all(self, x, out, *, stream=None):
        """Send the i-th of ``world_size`` parts of `x` to rank i, and receive one from each into `out`.

        `out` has as many elements, and shares no memory with `x`.
        """
        cdef BufferView src = self.input(x, "all_to_all")
        cdef BufferView dst = output_of(out, x, src)
        cdef Operation o
        self.describe_all_to_all(&o, src, dst)
        self._issue(&o, src, dst, stream)

    def gather(self, x, out, root, *, stream=None):
        """Copy every rank's `x` into `out` of `root`, ``world_size`` times as many; None elsewhere."""
        cdef BufferView src = self.input(x, "gather")
        cdef BufferView dst = None if out is None else output_of(out, x, src)
        cdef Operation o
        self.describe_gather(&o, src, dst, root)
        self._issue(&o, src, dst, stream)

    def scatter(self, x, out, root, *, stream=None):
        """Copy the i-th of ``world_size`` parts of the root's `x` into `out` of rank i.

        `x` is None elsewhere.
        """
        cdef BufferView src = None if x is None else self.input(x, "scatter")
        cdef BufferView dst = self.output(out, "scatter")
        cdef Operation o
        self.describe_scatter(&o, src, dst, root)
        self._issue(&o, dst if src is None else src, dst, stream)

    def send(self, x, peer, *, stream=None):
        """Send `x` to rank `peer`, which receives as many elements of the same dtype.

        Where ranks send to each other, put both calls into one `Group`.
        """
        cdef BufferView src = self.input(x, "send")
        cdef Operation o
        self.describe_send(&o, src, peer)
        self._issue(&o, src, None, stream)

    def recv(self, out, peer, *, stream=None):
        """Receive into `out` what rank `peer` sends: as many elements of the same dtype."""
        cdef BufferView dst = self.output(out, "recv")
        cdef Operation o
        self.describe_recv(&o, dst, peer)
        self._issue(&o, dst, None, stream)

    def allreduce_coalesced(self, xs, outs, op=ReduceOp.SUM, *, stream=None):
        """Reduce each of `xs` into the array at its place in `outs`, all as one group.

        Parameters
        ----------
        xs, outs : iterable of array
            As many; they may be the same. No two of `outs` share memory, nor one with an array of `xs`
            at another place. `op` is as `allreduce` takes it.
        """
        cdef list sources = list(arguments.in_order(xs))
        cdef list targets = sources if outs is xs else list(arguments.in_order(outs))
        cdef Py_ssize_t i
        cdef BufferView src
        cdef BufferView dst
        cdef Operation o
        if len(sources) != len(targets):
            arguments.check_size(
                "allreduce_coalesced", "outs", len(targets), len(sources), rank=self.rank)
        cdef Group group = Group()
        cdef KnownStream known = KnownStream(NULL, -1, NULL)
        if stream is not None:
            o.stream = _handle_of(stream)
        check_usable(self)
        group._begin(<size_t> len(sources))
        for i in range(len(sources)):
            src = self.input(sources[i], "allreduce_coalesced")
            dst = output_of(targets[i], sources[i], src)
            self.describe_allreduce(&o, src, dst, op)
            if stream is None:
                o.stream = known_stream(src, &known)
                if dst is not src and known_stream(dst, &known) != o.stream:
                    self._refuse_streams()
            if o.stream == cudaStreamPerThread:
                self._refuse_stream_of_thread()
            _add_to_group(group, self, o, src, dst)
        if not are_apart(group._operations):
            arguments.raise_overlap(
                "allreduce_coalesced", rank=self.rank, what="an array of outs overlaps another of outs or xs")
        group._finish()

    cdef int _launch_on(self, Operation* o, stream) except -1:
        """Launch what uses no arrays."""
        o.stream = _handle_of(stream)
        return self.launch(o[0], None, None, self.timeout_s)

    cdef int _issue(self, Operation* o, BufferView first, BufferView second, stream) except -1:
        cdef KnownStream known = KnownStream(NULL, -1, NULL)
        if stream is not None:
            o.stream = _handle_of(stream)
        else:
            o.stream = known_stream(first, &known)
            if second is not None and second is not first and known_stream(second, &known) != o.stream:
                self._refuse_streams()
        self.launch(o[0], first, second, self.timeout_s)
        return 0

    cdef int _refuse_streams(self) except -1:
        raise InvalidArray(
            "The libraries of x and out work on two streams now, and a call has one. Pass the stream "
            "that you have put in order with both.", rank=self.rank)

    cdef int _refuse_stream_of_thread(self) except -1:
        if self.is_blocking:
            return 0
        raise UnsupportedOp(
            "NCCL launches the calls of a non-blocking communicator in a thread of its own, whose default "
            "stream is not this thread's. Pass a stream, or make the communicator with blocking=True.",
            rank=self.rank)

    # ---- One-sided operations (NCCL 2.29.2) -------------------------------------

    def put(self, x, peer, Window window not None, offset=0, *, signal=0, context=0, stream=None):
        """Write `x` into the window of rank `peer`, `offset` bytes from its start, and signal it.

        Parameters
        ----------
        x : array
            In any symmetric window of this communicator.
        peer : int
        window : Window
            One that all ranks, `peer` among them, have made together.
        offset : int
            Bytes; a multiple of the size of an element. There has to be room for `x` behind it.
        signal, context : int
            Which of NCCL's counters announces it, and which of its queues carries it: both 0 unless
            ``num_rma_sig`` and ``num_rma_ctx`` ask for more, which they can from NCCL 2.31 on.
        """
        cdef BufferView src = self.input(x, "put")
        cdef Operation o
        self.set_elements(&o, "put", src, src.count)
        o.op = Op.put
        o.in_ = src.data
        o.peer = self.peer("put", peer)
        o.window = window.open(self)
        check_in_window(self, src)
        offset = arguments.named_integer("put", "offset", offset)
        window.check_room(src, offset)
        if offset % src.itemsize != 0:
            raise InvalidArray(
                f"put: offset {offset} is no multiple of the {src.itemsize} bytes of an element.",
                op="put", rank=self.rank)
        o.offset = offset
        self._set_signal(&o, "put", signal, context)
        self._issue(&o, src, None, stream)
        if current_group() != NULL:
            (<Group> current_group())._resources.append(window)

    def signal(self, peer, *, signal=0, context=0, stream):
        """Signal rank `peer` once `stream` has come to this point; `signal` and `context` as in `put`.

        Make a window first, and `put` into it: where NCCL has no one-sided operations, that is refused, while
        a signal ends a communicator that does not block.
        """
        cdef Operation o
        o.op = Op.signal
        o.peer = self._signal_peer("signal", peer)
        self._set_signal(&o, "signal", signal, context)
        self._launch_on(&o, stream)

    def wait_signal(self, peer, count=1, *, signal=0, context=0, stream):
        """Make `stream` wait for `count` signals from rank `peer`; `signal` and `context` as in `put`."""
        cdef Operation o
        o.op = Op.wait_signal
        o.peer = self._signal_peer("wait_signal", peer)
        o.signal_count = _number("wait_signal", "count", count, 1)
        self._set_signal(&o, "wait_signal", signal, context)
        self._launch_on(&o, stream)

    cdef int _signal_peer(self, str op, peer) except -1:
        if peer == self.rank:
            raise SelfSend(
                f"{op}: rank {self.rank} named itself as the peer. Put its streams in order with an event of "
                "CUDA instead.", op=op, rank=self.rank, peer=self.rank)
        return self.peer(op, peer)

    # NCCL refuses what it does not have, from which a non-blocking communicator does not recover.
    cdef int _set_signal(self, Operation* o, str op, signal, context) except -1:
        signal = arguments.named_integer(op, "signal", signal)
        context = arguments.named_integer(op, "context", context)
        if (signal or context) and get_version() < (2, 31):
            raise UnsupportedOp(
                f"{op}: NCCL has no signal and no context but 0 before 2.31.", op=op, rank=self.rank)
        if not 0 <= signal < self._num_signals or not 0 <= context < self._num_contexts:
            raise ValueError(
                f"{op}: there is no signal {signal} of context {context}. This communicator has "
                f"{self._num_signals} signals (num_rma_sig) and {self._num_contexts} contexts (num_rma_ctx), "
                "counted from 0.")
        o.signal = signal
        o.context = context
        return 0

    # ---- What NCCL keeps for a communicator --------------------------------------

    def premul_sum(self, scalar, str dtype, *, timeout=None):
        """Make the reduction that multiplies each rank's input by its `scalar`, then sums.

        Parameters
        ----------
        scalar : float
            Rounded to `dtype`.
        dtype : str
            A float dtype, that of the arrays: ``"float32"``.
        """
        return make_premul_sum(self, scalar, dtype, timeout)

    def register(self, x, *, timeout=None):
        """Tell NCCL of memory that will be used often, which spares it copies.

        Waits for no other rank. But where one rank passes registered memory to a call, all have to:
        in the call NCCL waits for theirs, perhaps for ever, as where GPUs reduce in the switch. Lasts
        until the `Registration` that this returns is closed or dropped, which must come after the calls
        that use the memory are done.
        """
        return make_registration(self, self.input(x, "register"), timeout)

    def register_window(self, x, *, bint symmetric=True, timeout=None):
        """Make memory reachable for all ranks, all of which call this with as much (NCCL 2.27).

        The collectives that use it need fewer steps, and `put` writes to it. Close the `Window` that this
        returns, on all ranks, after the calls that use it are done, and before the memory is closed.

        Parameters
        ----------
        x : array
            Begins at a multiple of 4096 bytes, and is memory of `NcclMemory` or of other allocators that
            use CUDA's virtual memory management. NCCL ends the communicator for any other.
        symmetric : bool
            Whether all ranks use the same part of it in a collective.
        """
        cdef int flags = NCCL_WIN_COLL_SYMMETRIC if symmetric else NCCL_WIN_DEFAULT
        return make_window(self, self.input(x, "register_window"), flags, timeout)

    # ---- Calls ------------------------------------------------------------------

    cdef int launch(
        self, const Operation& operation, BufferView first, BufferView second, double timeout
    ) except -1:
        check_usable(self)
        if operation.stream == cudaStreamPerThread:
            self._refuse_stream_of_thread()
        if current_group() != NULL:
            return _add_to_group(<Group> current_group(), self, operation, first, second)
        # The pointer need not be copied: it stays to the end, and the caller keeps this object.
        cdef Patience patience = Patience(timeout, is_interrupted, NULL)
        try:  # not Noting: it takes longer than the call
            with nogil:
                self._native.get().launch(operation, patience)
        except BaseException as error:
            self.note_of_call(error, (first, second))
            raise
        return 0

    cdef int set_own_reduction(self, Operation* o, str op, BufferView view, reduce_op) except -1:
        if type(reduce_op) is not PreMulSum:
            return Member.set_own_reduction(self, o, op, view, reduce_op)
        o.reduce_op = (<PreMulSum> reduce_op).open(self, op, view.dtype)
        if current_group() != NULL:
            # It is launched when the block ends, when nobody else may hold it any more.
            (<Group> current_group())._resources.append(reduce_op)
        return 0


cdef Communicator _connected(
    bint is_joining, world_size, vector[ncclUniqueId] ids, rank, device, timeout, alarm, dict config,
):
    cdef int native_rank
    cdef int num_ranks
    native_rank, num_ranks = arguments.check_place(rank, world_size)
    cdef ncclConfig_t native_config = config_of(config)
    cdef double seconds = arguments.check_timeout(timeout)
    cdef int number = device_number(device)
    cdef const Cudart* cuda = cudart()
    cdef Patience patience = patience_of(seconds)
    if alarm is not None:
        patience.heed(<const Alarm*> PyCapsule_GetPointer(alarm, "ferro::Alarm"))
    cdef Communicator made = Communicator.__new__(Communicator)
    made.rank = native_rank
    with Noting(made), nogil:
        if is_joining:
            made._native = Native.join(
                cuda[0], number, ids[0], num_ranks, native_rank, native_config, patience)
        else:
            made._native = Native.init(
                cuda[0], number, ids, num_ranks, native_rank, native_config, patience)
    return made.adopted(seconds, native_config)


# ---- Groups --------------------------------------------------------------------------

@cython.final
cdef class Group:
    """Launch several operations as one.

        with Group():
            communicator.send(x, 1)
            communicator.recv(y, 1)

    What is called in the ``with`` block is written down, and launched at its end: sends and
    receives then progress together, and many small operations cost one launch. If the block
    raises, nothing of it is launched. Arguments are checked where the calls are made; the group
    keeps arrays, and the streams that calls name, until it is launched. A call that names none uses
    the stream that is current where it is made: keep that one until the block's end. A group within
    a group is part of it. Methods that return something (`split`, `register`, ...) are not part of
    groups, and run at once.

    A group is its thread's: calls that other threads make meanwhile are not part of it.

    Raises
    ------
    DistributedError
        At the block's end: what NCCL refuses, or what has ended a communicator meanwhile.
        Nothing has been launched if that was so before, or if some of the streams are captured into
        a CUDA graph and others are not.
    UnsupportedOp
        Some communicators block, others do not.
    ValueError
        A reduction or a window was closed in the block that uses it. Nothing has been launched.
    """

    def __enter__(self):
        if self._is_open:
            raise RuntimeError("This group is open already.")
        self._is_open = True
        self._outer = None if current_group() == NULL else <Group> current_group()
        self._begin(TYPICAL_SIZE)
        (&current_group())[0] = <void*> self
        Py_INCREF(self)  # the thread's
        return self

    def __exit__(self, exc_type, exc, traceback):
        if not self._is_open:
            raise RuntimeError("This group is not open.")
        if current_group() != <void*> self:
            raise RuntimeError("A group must end in the thread in which it began, after those within it.")
        self._is_open = False
        (&current_group())[0] = NULL if self._outer is None else <void*> self._outer
        Py_DECREF(self)  # our caller has a reference, too
        try:
            if exc_type is None:
                self._finish()
        finally:
            self._operations.clear()
            self._outer = None
            self._kept = None
            self._communicators = None
            self._resources = None

    cdef int _begin(self, size_t size) except -1:
        self._operations.reserve(size)
        self._kept = []
        self._communicators = []
        self._resources = []
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
        outer._resources += self._resources
        return 0

    cdef int _launch(self) except -1:
        if self._operations.empty():
            return 0
        cdef Communicator first = self._communicators[0]
        cdef Patience patience = patience_of(first.timeout_s)
        # NCCL recovers from no use of what has been given back, and may have given its place to another.
        cdef Resource resource
        for resource in self._resources:
            resource.check_open()
        cdef Communicator each
        for each in self._communicators:
            if each.is_blocking != first.is_blocking:
                raise UnsupportedOp("group: NCCL cannot mix blocking and other communicators.", op="group")
        try:
            with nogil:
                launch_group(self._operations, patience)
        except BaseException as error:
            for each in self._communicators:
                each.note_of_call(error, self._kept)
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


cdef inline cudaStream_t _handle_of(stream) except? NULL:
    """Return the stream's address; let a group that this thread collects keep the stream."""
    cdef cudaStream_t handle = stream_handle(stream)
    if current_group() != NULL:
        (<Group> current_group())._kept.append(stream)
    return handle


cdef inline object _keeper_of(BufferView view):
    """Return what keeps the memory alive: the array alone, unless the view holds an export of it."""
    return view.owner if type(view) is BufferView else view


cdef vector[ncclUniqueId] _ids_of(unique_ids) except *:
    cdef vector[ncclUniqueId] ids
    is_one = unique_ids is None or isinstance(unique_ids, (UniqueId, bytes))
    for each in (unique_ids,) if is_one else arguments.in_order(unique_ids):
        if type(each) is not UniqueId:
            raise TypeError(
                f"unique_ids must be a UniqueId or several, not {each!r:.50}; UniqueId(data) makes one of "
                "its bytes.")
        ids.push_back((<nccl_library.UniqueId> each)._id)
    if ids.empty():
        raise ValueError("unique_ids is empty, and a communicator needs at least one.")
    return ids


cdef bint _is_in_force(int blocking):
    """Tell whether a communicator blocks: the environment overrides the option."""
    forced = os.environ.get("NCCL_COMM_BLOCKING")
    return forced == "1" if forced in ("0", "1") else blocking == 1


cdef int _number(str op, str name, value, int least) except? -1:
    """Return an argument that is an int of C in NCCL."""
    number = arguments.named_integer(op, name, value)
    if not least <= number <= INT_MAX:
        raise ValueError(f"{op}: {name} must be from {least} to {INT_MAX}, and is {number}.")
    return number


cdef int _or_one(int configured):
    return 1 if configured == NCCL_CONFIG_UNDEF_INT else configured
