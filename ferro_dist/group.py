"""From what a launcher left in the environment to a group."""

from __future__ import annotations

from ferro_dist.backends.host import HostBackend
from ferro_dist.rendezvous.environment import placement

__all__ = ["init"]


def init(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    *,
    token: bytes | str | None = None,
    timeout: float = 300.0,
) -> HostBackend:
    """Join the group that this process was started for.

    Rank, world size and address are taken from the arguments, else from the
    environment of ferrorun, torchrun, Open MPI, MPICH or Slurm, in that order. Where
    nothing is found, the group is a world of one.

    Parameters
    ----------
    rank, world_size : int, optional
    addr : str, optional
        ``"host:port"`` of rank 0.
    token : bytes or str, optional
        The secret that all ranks prove to know; default: ``FERRO_DIST_TOKEN``.
    timeout : float
        Seconds after which joining, and any blocking call that names no timeout of
        its own, gives up.

    Raises
    ------
    InvalidRank, InvalidWorldSize
        What was found is no place in a group, or two sources disagree.
    NoConnection, Timeout, PeerLostError
        The ranks could not connect; the message names the culprit.

    Examples
    --------
    >>> import ferro_dist as fd
    >>> with fd.init() as backend:
    ...     print(backend.rank, backend.world_size)
    0 1
    """
    place = placement(rank, world_size, addr)
    return HostBackend(
        place.rank,
        place.world_size,
        place.addr,
        token=token,
        timeout=timeout,
        listener=place.listener(),
        epoch=place.epoch,
    )
