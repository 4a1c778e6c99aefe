"""Making the group that a launcher has described in the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from ferro_dist.backends.host import HostBackend, TcpBackend
from ferro_dist.errors import BackendUnavailable, Io
from ferro_dist.rendezvous.environment import Placement, placement

if TYPE_CHECKING:
    from ferro_dist._native.nccl import UniqueId
    from ferro_dist.backends.hybrid import HybridBackend

__all__ = ["init"]


@overload
def init(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    *,
    backend: Literal["host", "tcp"] = "host",
    token: bytes | str | None = None,
    timeout: float = 300.0,
) -> HostBackend: ...


@overload
def init(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    *,
    backend: Literal["hybrid"],
    device: int | None = None,
    unique_id: UniqueId | bytes | None = None,
    config: dict[str, Any] | None = None,
    token: bytes | str | None = None,
    timeout: float = 300.0,
) -> HybridBackend: ...


@overload  # a name that is known only when the program runs
def init(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    *,
    backend: str,
    device: int | None = None,
    unique_id: UniqueId | bytes | None = None,
    config: dict[str, Any] | None = None,
    token: bytes | str | None = None,
    timeout: float = 300.0,
) -> HostBackend | HybridBackend: ...


def init(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    *,
    backend: str = "host",
    device: int | None = None,
    unique_id: UniqueId | bytes | None = None,
    config: dict[str, Any] | None = None,
    token: bytes | str | None = None,
    timeout: float = 300.0,
) -> HostBackend | HybridBackend:
    """Join the group that this process was started for.

    Rank, world size and address are taken from the arguments, else from the environment of
    ferrorun, torchrun, Open MPI, MPICH or Slurm, in that order. If nothing is found, this process
    is the only rank. Each call makes a new group. Threads of one process must not call it at the
    same time: the other ranks could not tell their calls apart.

    Parameters
    ----------
    rank, world_size : int, optional
    addr : str, optional
        ``"host:port"`` of rank 0.
    backend : str
        ``"host"``, ``"tcp"``, or ``"hybrid"`` for a group with a GPU on every rank.
    device : int, optional
        For ``"hybrid"``: this rank's GPU, which becomes the thread's current one. By default the
        ranks of a host take its GPUs in turn, by the local ranks that their launcher has given
        them. Without these, or if `rank` and `world_size` are given, it is the current GPU.
    unique_id : UniqueId or bytes, optional
        For ``"hybrid"``: NCCL's identifier of the group. By default rank 0 makes one.
    config : dict, optional
        For ``"hybrid"``: options of NCCL, as `NcclBackend` takes them.
    token : bytes or str, optional
        The secret that all ranks prove to know; default: ``FERRO_DIST_TOKEN``.
    timeout : float
        Seconds after which joining gives up, as does any blocking call that names no timeout of its
        own.

    Returns
    -------
    HostBackend, TcpBackend or HybridBackend

    Raises
    ------
    InvalidRank, InvalidWorldSize
        Rank and world size do not fit each other, or two sources disagree.
    NoConnection, Timeout, PeerLostError
        The ranks could not connect; the message names the culprit. NoConnection also if there are
        several ranks, and nothing says where rank 0 is.
    CollectiveMismatch
        Some ranks want to share memory, others (``"tcp"``) do not. ``"hybrid"``: they passed
        different unique ids, or only some of them passed one.
    Io
        A system call failed on some rank; the error says which.
    BackendUnavailable
        ``"hybrid"``: some rank has no NCCL or no GPU.
    ValueError, TypeError
        A bad `backend`, `timeout` or `token`, or an option that does not go with the backend.

    Examples
    --------
    >>> import ferro_dist as fd
    >>> with fd.init() as backend:
    ...     print(backend.rank, backend.world_size)
    0 1
    """
    kind = _kind_of(backend)
    options: dict[str, Any] = {"device": device, "unique_id": unique_id, "config": config}
    if backend != "hybrid":
        _refuse_options_of_gpus(options, backend)
        options = {}
    place = placement(rank, world_size, addr)
    if backend == "hybrid" and device is None:
        options["device"] = _device_of(place)
    return kind(
        place.rank,
        place.world_size,
        place.addr,
        token=token,
        timeout=timeout,
        listener=place.listener(),
        epoch=place.epoch,
        **options,
    )


# What other libraries, or the groups themselves, call what is wanted.
_HINTS = {
    "gloo": '; "host" is in its place',
    "mpi": "; MpiBackend() makes its group itself",
    "nccl": '; "hybrid" has NCCL for GPU arrays',
    "simulated": "; SimulatedBackend.create_group makes all ranks at once",
}


def _kind_of(backend: str) -> type[HostBackend | HybridBackend]:
    if backend == "hybrid":
        from ferro_dist.backends.hybrid import HybridBackend

        return HybridBackend
    kinds = {"host": HostBackend, "tcp": TcpBackend}
    if not isinstance(backend, str) or backend not in kinds:
        hint = _HINTS.get(str(backend), "")
        raise ValueError(f'backend must be "host", "tcp" or "hybrid", not {backend!r}{hint}')
    return kinds[backend]


def _refuse_options_of_gpus(options: dict[str, Any], backend: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f'{name} is for backend="hybrid", not {backend!r}')


def _device_of(place: Placement) -> int | None:
    """Return the GPU of this rank; None, for the current one, where it has no local number."""
    from ferro_dist._native.cuda_libraries import load_cudart

    try:
        load_cudart()
        from ferro_dist._native.cuda_runtime import device_count

        num_devices = device_count()
    except (BackendUnavailable, Io):
        num_devices = 0  # HybridBackend tells all ranks why
    if place.local_rank is None or num_devices == 0:
        return None
    return place.local_rank % num_devices
