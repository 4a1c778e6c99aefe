"""Messages between stages: trees of arrays whose shapes the receiver learns on arrival.

A message is a header of fixed size (`message_header`) followed by the arrays, each as it lies in
memory. GPU arrays go separately, from GPU to GPU (`gpu_channels`):

    | header | rest of the description, if long | arrays |

The description is the structure of the tree with dtype and shape of each array, so nobody has to
know beforehand what a stage will return, or run it to find out.

Sending is asynchronous. For each peer that sends to it, a rank has a thread that receives what has
been posted, in order, for the length of one step: so an empty queue holds up no other, and messages
arrive while this rank computes. That thread also starts to receive GPU arrays, as soon as a header
has announced them; when the message is taken, the current stream waits for them, and the host does
not.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ferro_dist import interop
from ferro_dist.errors import DistributedError
from ferro_dist.parallel.pipeline import pytree
from ferro_dist.parallel.pipeline.message_header import (
    HEADER_NBYTES,
    ROOM_NBYTES,
    Header,
    MessageKind,
    RunId,
)
from ferro_dist.parallel.schedules import Action, ActionKind
from ferro_dist.point_to_point import P2POp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.pipeline.gpu_channels import GpuChannels
    from ferro_dist.work import Work

__all__ = [
    "ArraySpec",
    "Forecasts",
    "Link",
    "Memory",
    "Parcel",
    "PeerAborted",
    "Receiver",
    "Sender",
    "meet",
]

Array = Any

_KINDS = {
    ActionKind.RECV_ACTIVATION: MessageKind.ACTIVATION,
    ActionKind.RECV_GRADIENT: MessageKind.GRADIENT,
}


class Link(NamedTuple):
    """How this rank reaches the others in one run, and what all messages of the run share."""

    backend: Backend
    gpu_channels: GpuChannels | None
    tag: int
    run_id: RunId
    timeout: float | None


class ArraySpec(NamedTuple):
    """What the receiver must know of an array before it comes."""

    dtype: str
    shape: tuple[int, ...]
    wants_gradient: bool
    is_on_host: bool

    def __str__(self) -> str:
        gradient = "" if self.wants_gradient else ", without gradient"
        place = "" if self.is_on_host else ", on a GPU"
        return f"{self.dtype} of shape {self.shape}{gradient}{place}"


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
    """Starts sends to all peers, and keeps what they send until they have ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
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
        header = Header(
            self._link.run_id,
            _KINDS[receive.kind],
            receive.stage,
            receive.microbatch,
            parcel.rows,
            parcel.total_rows,
            parcel.is_weighted,
            len(description),
        )
        ops = [P2POp("send", header.pack(description), peer)]
        rest = description[ROOM_NBYTES:]
        if rest:
            ops.append(P2POp("send", np.frombuffer(rest, np.uint8), peer))
        payload = [interop.contiguous(array) for array in parcel.arrays]
        channels, timeout = self._link.gpu_channels, self._link.timeout
        if channels is not None:
            payload, on_gpu = _by_place(payload, specs)
            if on_gpu:
                # First: if this cannot be started, the header that announces it is not sent.
                self._under_way.append(channels.send(on_gpu, peer, timeout))
        self._start(ops + [P2POp("send", array, peer) for array in payload])
        return sum(array.nbytes for array in payload)

    def abort(self, peer: int) -> None:
        """Tell a peer that nothing more will come in this step."""
        header = Header(self._link.run_id, MessageKind.ABORT)
        self._start([P2POp("send", header.pack(), peer)])

    def release_sent(self) -> None:
        """Release what has been sent; raise the error of a send that failed."""
        if not self._under_way:
            return
        still_under_way = []
        for work in self._under_way:
            # Asked once: one that ends between two questions would be dropped with its error.
            if work.is_completed():
                work.wait()
            else:
                still_under_way.append(work)
        self._under_way = still_under_way

    def wait(self) -> None:
        """Wait until everything has been sent."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def _start(self, ops: list[P2POp]) -> None:
        link = self._link
        self._under_way.append(link.backend.batch(ops, True, link.timeout, link.tag))  # type: ignore[arg-type]


class Receiver:
    """Receives, on a thread of its own, what one peer sends in one step.

    Parameters
    ----------
    link : Link
    peer : int
    expected : sequence of Action
        The receives of the whole step, in the order of this rank's list.
    memory_of : function
        Returns the memory of a stage of this rank.
    forecasts : Forecasts
        Read and written.
    """

    def __init__(
        self,
        link: Link,
        peer: int,
        expected: Sequence[Action],
        memory_of: Callable[[int], Memory],
        forecasts: Forecasts,
    ) -> None:
        self._link = link
        self._peer = peer
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

    def start(self) -> None:
        """Start the thread. If this raises, as for Ctrl-C, none is left that could receive."""
        try:
            self._thread.start()
        except BaseException:
            self.end()
            raise

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
            if self._link.gpu_channels is not None:
                self._link.gpu_channels.adopt_thread()
            while (receive := self._posted.get()) is not None:
                arrival = self._receive(receive)
                if not self._is_draining:
                    self._outcomes.put(arrival)
                del arrival  # it belongs to the taker, who releases it
        except (PeerAborted, DistributedError) as error:
            self._outcomes.put(error.with_traceback(None))
        except BaseException as error:
            # What the peer has announced will not be received, and the peer must not wait for that.
            self._link.backend.interrupt(error)
            self._outcomes.put(error.with_traceback(None))

    def _receive(self, receive: Action) -> _Arrival:
        self._recv(self._header)
        header, description = _unpack_header(self._link, self._peer, self._header)
        self._check(header, receive)
        rest = np.empty(header.description_nbytes - len(description), np.uint8)
        if rest.size:
            self._recv(rest)
        structure, specs = _decode(description + rest.tobytes())
        self._forecasts[receive.kind, receive.stage] = specs
        memory = self._memory_of(receive.stage)
        channels, timeout = self._link.gpu_channels, self._link.timeout
        # Without channels all arrays are in host memory, and this thread uses no GPU.
        with contextlib.nullcontext() if channels is None else memory.receiving():
            arrays = on_host = self._take_room(receive.stage, specs)
            on_gpu: list[Array] = []
            under_way = None
            if channels is not None:
                on_host, on_gpu = _by_place(arrays, specs)
                if on_gpu:
                    under_way = channels.recv(on_gpu, self._peer, timeout)
        self._recv(*on_host)
        delivered = list(map(memory.deliver, specs, arrays))
        share = header.rows, header.total_rows, header.is_weighted
        return _Arrival(receive, Parcel(structure, delivered, *share), on_gpu, under_way)

    def _check(self, header: Header, receive: Action) -> None:
        if header.kind == MessageKind.ABORT:
            raise PeerAborted
        self._link.run_id.check(header.run_id, self._peer)
        due = _KINDS[receive.kind], receive.stage, receive.microbatch
        if (header.kind, header.stage, header.microbatch) != due:
            raise RuntimeError(
                f"Pipeline: rank {self._peer} sent stage {header.stage}, microbatch "
                f"{header.microbatch} where {receive} was due."
            )

    def _take_room(self, stage: int, specs: list[ArraySpec]) -> list[Array]:
        """Return room for a message: that made in advance, if it is such a message's."""
        room, self._room = self._room, None
        if room is not None and room[:2] == (stage, specs):
            return room[2]
        return self._allocate(stage, specs)

    def _recv(self, *arrays: Array) -> None:
        link = self._link
        if len(arrays) == 1:
            link.backend.recv(arrays[0], self._peer, False, link.timeout, link.tag)
        elif arrays:
            ops = [P2POp("recv", array, self._peer) for array in arrays]
            link.backend.batch(ops, False, link.timeout, link.tag)


def meet(link: Link, receivers: Iterable[int], senders: Iterable[int]) -> None:
    """Make sure that the peers of this rank make the same call, before one that sends no parcels.

    Parameters
    ----------
    link : Link
    receivers, senders : iterable of int
        The peers to which this rank sends parcels in a step, and those from which it gets some.

    Raises
    ------
    RuntimeError
        A peer makes another call. The group has ended.
    DistributedError
        The group has ended, perhaps because another rank has found this out.
    """
    own = Header(link.run_id, MessageKind.MEETING).pack()
    headers = {peer: np.empty(HEADER_NBYTES, np.uint8) for peer in senders}
    ops = [P2POp("send", own, peer) for peer in receivers]
    ops += [P2POp("recv", header, peer) for peer, header in headers.items()]
    link.backend.batch(ops, False, link.timeout, link.tag)
    try:
        for peer, header in headers.items():
            link.run_id.check(_unpack_header(link, peer, header)[0].run_id, peer)
    except RuntimeError as error:
        link.backend.interrupt(error)  # the peer waits for what will not come
        raise


def _unpack_header(link: Link, peer: int, received: np.ndarray[Any, Any]) -> tuple[Header, bytes]:
    """Unpack a header that was received, or the next one if that is left of an earlier run.

    If Ctrl-C strikes a rank right after its last message of a run to this one, it sends an abort
    nevertheless, for which no receive is posted.
    """
    header, description = Header.unpack(received)
    while header.kind == MessageKind.ABORT and header.run_id.number < link.run_id.number:
        link.backend.recv(received, peer, False, link.timeout, link.tag)
        header, description = Header.unpack(received)
    return header, description


def _by_place(
    arrays: Sequence[Array], specs: Sequence[ArraySpec]
) -> tuple[list[Array], list[Array]]:
    """Return the arrays on the host, and those on a GPU."""
    pairs = list(zip(arrays, specs, strict=True))
    on_host = [array for array, spec in pairs if spec.is_on_host]
    return on_host, [array for array, spec in pairs if not spec.is_on_host]


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
