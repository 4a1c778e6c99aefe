"""Messages between stages: trees of arrays whose shapes the receiver learns on arrival.

A message is a header of fixed size followed by the arrays, each as it lies in memory. GPU arrays go
separately, from GPU to GPU (`gpu_channels`):

    | run, call, kind, stage, microbatch, rows, length | description ... | rest, if long | arrays |

The description is the structure of the tree with dtype and shape of each array, so nobody has to
know beforehand what a stage will return, or run it to find out.

Sending is asynchronous. For each peer that sends to it, a rank has a thread that receives what has
been posted, in order, for the length of one step: so an empty queue holds up no other, and messages
arrive while this rank computes. That thread also starts to receive GPU arrays, as soon as a header
has announced them; when the message is taken, the current stream waits for them, and the host does
not.
"""

from __future__ import annotations

import json
import queue
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ferro_dist import interop
from ferro_dist.errors import DistributedError
from ferro_dist.parallel import pytree
from ferro_dist.parallel.schedules import Action, ActionKind
from ferro_dist.point_to_point import P2POp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.gpu_channels import GpuChannels
    from ferro_dist.work import Work

__all__ = [
    "ArraySpec",
    "Forecasts",
    "Memory",
    "Parcel",
    "PeerAborted",
    "Receiver",
    "RunId",
    "Sender",
    "meet",
]

Array = Any

HEADER_NBYTES = 256
_FIELDS = struct.Struct("<IBIiiII?I")
_ROOM_NBYTES = HEADER_NBYTES - _FIELDS.size
_ABORT = 0
_CODES = {
    kind: code
    for code, kind in enumerate(
        (ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT), start=_ABORT + 1
    )
}


_MEETING = 1 + len(_CODES)
CALLS = ("step", "forward", "backward", "eval", "plan")


class RunId(NamedTuple):
    """One run of a pipeline: its number, and which of `CALLS` was made."""

    number: int
    call: str

    def header(self, code: int) -> np.ndarray[Any, Any]:
        """Return the header of a message that consists of nothing else."""
        call = CALLS.index(self.call)
        return _header(_FIELDS.pack(self.number, call, code, 0, 0, 0, 0, False, 0))

    def check(self, number: int, call: int, peer: int) -> None:
        """Raise RuntimeError if a header tells that its sender makes another call."""
        if (number, CALLS[call]) != self:
            raise RuntimeError(
                f"Pipeline: rank {peer} has called {CALLS[call]}(), its run {number}, and "
                f"this rank {self.call}(), its run {self.number}. All ranks of a "
                "pipeline must make the same calls in the same order"
            )


class ArraySpec(NamedTuple):
    """What the receiver must know of an array before it comes."""

    dtype: str
    shape: tuple[int, ...]
    wants_gradient: bool
    is_on_host: bool


class Parcel(NamedTuple):
    """A tree on its way from stage to stage, with the share of the batch that it stands for.

    That is `rows` of the batch's `total_rows`, both zero for gradients; it also says whether the
    rank of the first stage was given a weight, which only the rank of the last stage can use.
    """

    structure: pytree.Structure
    arrays: Sequence[Array]
    rows: int = 0
    total_rows: int = 0
    is_weighted: bool = False


class PeerAborted(Exception):
    """A peer has given up the step. The end of the step tells what went wrong."""


class Memory(Protocol):
    """Where a stage receives its input. The first three methods are called by any thread."""

    def receiving(self) -> AbstractContextManager[Any]:
        """Return the context in which to allocate memory and receive into it."""

    def allocate(self, spec: ArraySpec) -> Array:
        """Make room for an array that will be received."""

    def deliver(self, spec: ArraySpec, received: Array) -> Array:
        """Turn what was received into an input."""

    def take_over(self, received: Array) -> None:
        """Note that an array on a GPU is used on the current stream from now on."""


Describe = Callable[[Array], ArraySpec]
Forecasts = dict[tuple[ActionKind, int], list[ArraySpec]]
"""What the last message of each kind held, for each stage; kept over all steps."""


class _Arrival(NamedTuple):
    """A message that is here, except for what is still on its way to this rank's GPU."""

    receive: Action
    parcel: Parcel
    on_gpu: Sequence[Array] = ()
    under_way: Work | None = None


class Sender:
    """Starts sends to all peers, and keeps what they send until they have ended.

    Parameters
    ----------
    backend : Backend
    gpu_channels : GpuChannels or None
    tag : int
        Of all messages of this pipeline.
    run_id : RunId
    timeout : float or None
    """

    def __init__(
        self,
        backend: Backend,
        gpu_channels: GpuChannels | None,
        tag: int,
        run_id: RunId,
        timeout: float | None,
    ) -> None:
        self._backend = backend
        self._gpu_channels = gpu_channels
        self._tag = tag
        self._run_id = run_id
        self._timeout = timeout
        self._under_way: list[Work] = []

    def send(self, peer: int, receive: Action, parcel: Parcel, describe: Describe) -> int:
        """Start to send what the peer's action `receive` expects.

        Returns
        -------
        int
            How many bytes of arrays go from host to host.
        """
        specs = tuple(map(describe, parcel.arrays))
        description = _encode(parcel.structure, specs)
        head, rest = description[:_ROOM_NBYTES], description[_ROOM_NBYTES:]
        fields = _FIELDS.pack(
            self._run_id.number,
            CALLS.index(self._run_id.call),
            _CODES[receive.kind],
            receive.stage,
            receive.microbatch,
            parcel.rows,
            parcel.total_rows,
            parcel.is_weighted,
            len(description),
        )
        ops = [P2POp("send", _header(fields + head), peer)]
        if rest:
            ops.append(P2POp("send", np.frombuffer(rest, np.uint8), peer))
        payload = [interop.contiguous(array) for array in parcel.arrays]
        if self._gpu_channels is not None:
            payload, on_gpu = _by_place(payload, specs)
            if on_gpu:
                # First: if this cannot be started, the header that announces it is not sent.
                self._under_way.append(self._gpu_channels.send(on_gpu, peer, self._timeout))
        self._start(ops + [P2POp("send", array, peer) for array in payload])
        return sum(array.nbytes for array in payload)

    def abort(self, peer: int) -> None:
        """Tell a peer that nothing more will come in this step."""
        self._start([P2POp("send", self._run_id.header(_ABORT), peer)])

    def release_sent(self) -> None:
        """Release what has been sent; raise the error of a send that failed."""
        if not self._under_way:
            return
        for work in self._under_way:
            if work.is_completed():
                work.wait()
        self._under_way = [work for work in self._under_way if not work.is_completed()]

    def wait(self) -> None:
        """Wait until everything has been sent."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def _start(self, ops: list[P2POp]) -> None:
        self._under_way.append(self._backend.batch(ops, True, self._timeout, self._tag))  # type: ignore[arg-type]


class Receiver:
    """Receives, on a thread of its own, what one peer sends in one step.

    Parameters
    ----------
    backend : Backend
    peer : int
    gpu_channels, tag, run_id, timeout
        As in `Sender`.
    expected : sequence of Action
        The receives of the whole step, in the order of this rank's list.
    memory_of : function
        Returns the memory of a stage of this rank.
    forecasts : Forecasts
        Read and written.
    """

    def __init__(
        self,
        backend: Backend,
        gpu_channels: GpuChannels | None,
        peer: int,
        tag: int,
        run_id: RunId,
        timeout: float | None,
        expected: Sequence[Action],
        memory_of: Callable[[int], Memory],
        forecasts: Forecasts,
    ) -> None:
        self._backend = backend
        self._gpu_channels = gpu_channels
        self._peer = peer
        self._tag = tag
        self._run_id = run_id
        self._timeout = timeout
        self._expected = expected
        self._memory_of = memory_of
        self._forecasts = forecasts
        # Written by the taker, and emptied by the thread.
        self._room: tuple[int, list[ArraySpec], list[Array]] | None = None
        self._num_posted = 0
        self._arrived: dict[Action, _Arrival] = {}
        # To the thread: receives that are posted, then None. From it: the result of each.
        self._posted: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[_Arrival | BaseException] = queue.SimpleQueue()
        self._is_draining = False
        self._header = np.empty(HEADER_NBYTES, np.uint8)
        self._thread = threading.Thread(
            target=self._receive_posted, name=f"pipeline-receiver-{peer}", daemon=True
        )
        self._thread.start()

    def post(self, receive: Action) -> None:
        """Post the next receive."""
        self._num_posted += 1
        self._posted.put(receive)

    def take(self, receive: Action) -> Parcel:
        """Wait for a message that was posted, and return it.

        Raises
        ------
        PeerAborted
            It will not come.
        DistributedError
            The group has ended.
        """
        while receive not in self._arrived:
            if self._outcomes.empty():
                self._make_room(receive)
            outcome = self._outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            self._arrived[outcome.receive] = outcome
        arrival = self._arrived.pop(receive)
        if arrival.under_way is not None:
            arrival.under_way.wait()  # lets the current stream wait
            for array in arrival.on_gpu:
                self._memory_of(receive.stage).take_over(array)
        return arrival.parcel

    def _make_room(self, receive: Action) -> None:
        """Use idle time to make room in advance for what will arrive."""
        specs = self._forecasts.get((receive.kind, receive.stage))
        if self._room is None and specs and all(spec.is_on_host for spec in specs):
            self._room = receive.stage, specs, self._allocate(receive.stage, specs)

    def _allocate(self, stage: int, specs: Sequence[ArraySpec]) -> list[Array]:
        allocate = self._memory_of(stage).allocate
        return [allocate(spec) for spec in specs]

    def drain(self) -> None:
        """Receive, and drop, everything that the peer may still send in this step."""
        self._is_draining = True
        self._arrived.clear()
        for receive in self._expected[self._num_posted :]:
            self.post(receive)

    def end(self) -> None:
        """Let the thread end once it has received what was posted."""
        self._posted.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _receive_posted(self) -> None:
        try:
            while (receive := self._posted.get()) is not None:
                arrival = self._receive(receive)
                if not self._is_draining:
                    self._outcomes.put(arrival)
                del arrival  # it belongs to the taker, who releases it
        except (PeerAborted, DistributedError) as error:
            self._outcomes.put(error.with_traceback(None))
        except BaseException as error:
            # What the peer has announced will not be received, and the peer must not wait for that.
            self._backend.interrupt(error)
            self._outcomes.put(error.with_traceback(None))

    def _receive(self, receive: Action) -> _Arrival:
        self._recv(self._header)
        head = self._header.tobytes()
        number, call, code, stage, microbatch, *share, length = _FIELDS.unpack_from(head)
        if code == _ABORT:
            raise PeerAborted
        self._run_id.check(number, call, self._peer)
        if (code, stage, microbatch) != (
            _CODES[receive.kind],
            receive.stage,
            receive.microbatch,
        ):
            raise RuntimeError(
                f"Pipeline: rank {self._peer} sent stage {stage}, microbatch {microbatch} where "
                f"{receive} was due."
            )
        structure, specs = _decode(self._description(head, length))
        self._forecasts[receive.kind, receive.stage] = specs
        room, self._room = self._room, None
        memory = self._memory_of(receive.stage)
        with memory.receiving():
            if room is not None and room[:2] == (receive.stage, specs):
                arrays = room[2]
            else:
                arrays = self._allocate(receive.stage, specs)
            on_host = arrays
            on_gpu: list[Array] = []
            under_way = None
            if self._gpu_channels is not None:
                on_host, on_gpu = _by_place(arrays, specs)
                if on_gpu:
                    under_way = self._gpu_channels.recv(on_gpu, self._peer, self._timeout)
        self._recv(*on_host)
        delivered = list(map(memory.deliver, specs, arrays))
        return _Arrival(receive, Parcel(structure, delivered, *share), on_gpu, under_way)

    def _description(self, head: bytes, length: int) -> bytes:
        inline = head[_FIELDS.size : _FIELDS.size + length]
        if length <= _ROOM_NBYTES:
            return inline
        rest = np.empty(length - _ROOM_NBYTES, np.uint8)
        self._recv(rest)
        return inline + rest.tobytes()

    def _recv(self, *arrays: Array) -> None:
        if len(arrays) == 1:
            self._backend.recv(arrays[0], self._peer, False, self._timeout, self._tag)
        elif arrays:
            ops = [P2POp("recv", array, self._peer) for array in arrays]
            self._backend.batch(ops, False, self._timeout, self._tag)


def meet(
    backend: Backend,
    tag: int,
    run_id: RunId,
    receivers: Iterable[int],
    senders: Iterable[int],
    timeout: float | None,
) -> None:
    """Make sure that the peers of this rank make the same call, before one that sends no parcels.

    Parameters
    ----------
    backend, tag, run_id, timeout
        As in `Sender`.
    receivers, senders : iterable of int
        The peers to which this rank sends parcels in a step, and those from which it gets some.

    Raises
    ------
    RuntimeError
        A peer makes another call. The group has ended.
    DistributedError
        The group has ended, perhaps because another rank has found this out.
    """
    headers = {peer: np.empty(HEADER_NBYTES, np.uint8) for peer in senders}
    ops = [P2POp("send", run_id.header(_MEETING), peer) for peer in receivers]
    ops += [P2POp("recv", header, peer) for peer, header in headers.items()]
    backend.batch(ops, False, timeout, tag)
    try:
        for peer, header in headers.items():
            number, call, *_ = _FIELDS.unpack_from(header.tobytes())
            run_id.check(number, call, peer)
    except RuntimeError as error:
        backend.interrupt(error)  # the peer waits for what will not come
        raise


def _by_place(
    arrays: Sequence[Array], specs: Sequence[ArraySpec]
) -> tuple[list[Array], list[Array]]:
    """Return the arrays on the host, and those on a GPU."""
    pairs = list(zip(arrays, specs, strict=True))
    on_host = [array for array, spec in pairs if spec.is_on_host]
    return on_host, [array for array, spec in pairs if not spec.is_on_host]


def _header(content: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(content.ljust(HEADER_NBYTES, b"\0"), np.uint8)


# A training loop sends the same few kinds of trees again and again.


@lru_cache(maxsize=256)
def _encode(structure: pytree.Structure, specs: tuple[ArraySpec, ...]) -> bytes:
    return json.dumps([structure, specs], separators=(",", ":")).encode()


@lru_cache(maxsize=256)
def _decode(description: bytes) -> tuple[pytree.Structure, list[ArraySpec]]:
    structure, specs = json.loads(description)
    return pytree.from_lists(structure), [
        ArraySpec(dtype, tuple(shape), wants_gradient, is_on_host)
        for dtype, shape, wants_gradient, is_on_host in specs
    ]
