"""How a pipeline's messages travel from GPU to GPU.

NCCL runs the calls on one communicator one after the other, in the order in which they were made,
and a large send lasts until it is received. Two neighbours that each send before they receive, as
under 1F1B, where an activation and a gradient pass each other, would wait forever on one
communicator. So each pair of ranks has a communicator for each direction that is used, on which one
only sends, and the other only receives, in the same order.

Made once, by all ranks: two calls for each direction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ferro_dist.backends.nccl import END_GRACE_S
from ferro_dist.parallel.schedules import Action, placement_of
from ferro_dist.point_to_point import P2POp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.backends.hybrid import HybridBackend
    from ferro_dist.backends.nccl import NcclBackend
    from ferro_dist.work import Work

__all__ = ["RECEIVER", "SENDER", "GpuChannels", "make_gpu_channels"]

Array = Any

SENDER, RECEIVER = 0, 1
"""The rank numbers within a channel."""


class GpuChannels:
    """This rank's ends of the channels.

    Parameters
    ----------
    rank : int
    device : int
        This rank's GPU.
    channels : mapping of (int, int) to NcclBackend
        By sender and receiver; one of them is this rank.
    """

    def __init__(
        self, rank: int, device: int, channels: Mapping[tuple[int, int], NcclBackend]
    ) -> None:
        self._rank = rank
        self._device = device
        self._channels = channels

    def adopt_thread(self) -> None:
        """Make this rank's GPU the current one of a new thread, for good.

        It begins on the first GPU. An array library that goes back there makes a context on it,
        which takes hundreds of megabytes from the rank whose GPU that is.
        """
        from ferro_dist._native.cuda_runtime import set_device

        set_device(self._device)

    def send(self, arrays: Sequence[Array], peer: int, timeout: float | None) -> Work:
        """Start to send arrays of this rank's GPU. Blocks neither the host nor its streams."""
        return self._start(self._channels[self._rank, peer], "send", arrays, RECEIVER, timeout)

    def recv(self, arrays: Sequence[Array], peer: int, timeout: float | None) -> Work:
        """Start to receive into arrays of this rank's GPU, without blocking, as in `send`."""
        return self._start(self._channels[peer, self._rank], "recv", arrays, SENDER, timeout)

    def close(self) -> None:
        """Wait for what is under way, and end the channels. Idempotent."""
        with contextlib.ExitStack() as ends:
            # In the same order on all ranks: both ends of a channel wait for each other.
            for _, channel in sorted(self._channels.items()):
                ends.callback(channel.close, min(channel.timeout, END_GRACE_S))

    def abort(self) -> None:
        """End the channels at once, whatever is under way. Other ranks are not told."""
        with contextlib.ExitStack() as ends:
            for channel in self._channels.values():
                ends.callback(channel.abort)

    def _start(
        self,
        channel: NcclBackend,
        op: Literal["send", "recv"],
        arrays: Sequence[Array],
        peer: int,
        timeout: float | None,
    ) -> Work:
        ops = [P2POp(op, array, peer) for array in arrays]
        work: Work = channel.batch(ops, True, timeout, 0)
        return work


def make_gpu_channels(
    schedule: Iterable[Sequence[Action]], backend: Backend, timeout: float | None
) -> GpuChannels | None:
    """Connect the GPUs of a pipeline. Called by all ranks with the same schedule.

    Returns
    -------
    GpuChannels or None
        None if the group moves no arrays from GPU to GPU.
    """
    from ferro_dist.backends.hybrid import HybridBackend

    if not isinstance(backend, HybridBackend):
        return None
    channels = {}
    with contextlib.ExitStack() as made:
        for direction in _directions(schedule):
            channel = backend.nccl.split(direction, timeout)
            if channel is None:
                continue
            made.callback(channel.abort)
            # Between ranks of one host NCCL does not notice that one has died.
            channel.heed(backend.tcp.alarm())
            _open(channel, backend, timeout)
            channels[direction] = channel
        made.pop_all()
    return GpuChannels(backend.rank, backend.device, channels)


def _directions(schedule: Iterable[Sequence[Action]]) -> list[tuple[int, int]]:
    lists = list(schedule)
    placement = placement_of(lists)
    sends = [action for actions in lists for action in actions if action.kind.is_send]
    return sorted({(placement[a.stage], placement[a.other_side.stage]) for a in sends})


def _open(channel: NcclBackend, backend: HybridBackend, timeout: float | None) -> None:
    """Send one byte: NCCL connects two ranks in their first message, which delays all others."""
    from ferro_dist._native.cuda_memory import DeviceMemory

    byte = DeviceMemory(1, backend.nccl.device)
    if channel.rank == SENDER:
        channel.send(byte, RECEIVER, False, timeout, 0)
    else:
        channel.recv(byte, SENDER, False, timeout, 0)
    channel.synchronize(timeout)
