"""This process's place in the world, from its arguments or from its launcher.

The known launchers are ferrorun, torchrun (and anything else that sets ``RANK`` and
``WORLD_SIZE``), Open MPI, MPICH and its relatives (PMI), and Slurm. They are looked for in this
order, and the later ones must not contradict: a variable left behind in a shell would otherwise
give every process the same rank. A launcher that only started this process's launcher (``srun
torchrun ...``) contradicts nobody.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ferro_dist.arguments import check_place
from ferro_dist.errors import InvalidRank, InvalidWorldSize
from ferro_dist.rendezvous.address import parse_addresses
from ferro_dist.rendezvous.authentication import token_source
from ferro_dist.rendezvous.launchers import FINDERS, Environ, Source, number_of
from ferro_dist.rendezvous.rank_zero import find_addr

__all__ = ["Placement", "placement"]


@dataclass(frozen=True)
class Placement:
    """Which rank this is, among how many, and where rank 0 is found.

    Attributes
    ----------
    addr : str or None
        What `ferro_dist.rendezvous.connect` takes; None for a single rank.
    local_rank, local_world_size : int or None
        The place among the ranks of this host; None if unknown.
    launcher : str
        ``"arguments"``, ``"ferrorun"``, ``"torchrun"``, ``"openmpi"``, ``"mpich"``, ``"slurm"``, or
        ``"none"`` for a single rank by default.
    token_source : str
        Where the token is: a variable's name, or ``"file"``.
    epoch : str
        Distinguishes this attempt of a job from earlier ones; the same on all ranks.
    """

    rank: int
    world_size: int
    addr: str | None
    local_rank: int | None
    local_world_size: int | None
    launcher: str
    token_source: str
    epoch: str
    listen_fd: int | None = None

    def listener(self) -> socket.socket | None:
        """Return a copy of the socket at which ferrorun listens for rank 0, if it does.

        None in a process that has inherited the variable but not the socket.
        """
        if self.rank > 0 or self.listen_fd is None or self.addr is None:
            return None
        with contextlib.suppress(OSError):
            sock = _socket_at(os.dup(self.listen_fd))  # which no child inherits
            if _listens_at(self.addr, sock):
                return sock
            sock.close()
        return None


def _socket_at(fd: int) -> socket.socket:
    """Make a socket from a descriptor, which is closed if it is not one."""
    try:
        return socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise


def _listens_at(addr: str, sock: socket.socket) -> bool:
    is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    name = sock.getsockname()
    ports = {address.port for address in parse_addresses(addr)}
    return bool(is_listening) and isinstance(name, tuple) and name[1] in ports


def placement(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    environ: Environ = os.environ,
) -> Placement:
    """Find this process's place.

    Parameters
    ----------
    rank, world_size : int, optional
        If both are given, they are used, whatever the environment says. One alone must agree with
        the environment, which gives the other.
    addr : str, optional
        Where rank 0 listens; default from the environment.
    environ : mapping, optional

    Returns
    -------
    Placement
        A single rank if neither arguments nor environment say anything.

    Raises
    ------
    InvalidRank, InvalidWorldSize
        A value is not a rank or world size, or two sources contradict each other; the message names
        the variables.
    NoConnection
        There are several ranks, and nothing says where rank 0 is.
    """
    if rank is not None and world_size is not None:
        sources = [_from_arguments(rank, world_size)]
    else:
        sources = _from_environment(environ)
        _check_argument(sources[0] if sources else None, rank, world_size)
    if not sources:
        if world_size is None:
            _check_unread(addr, environ)
        return Placement(0, 1, None, 0, 1, "none", token_source(environ), "")
    source = _complete(sources)
    is_alone = source.world_size == 1
    return Placement(
        rank=source.rank,
        world_size=source.world_size,
        addr=None if is_alone else find_addr(sources, addr, environ),
        local_rank=0 if is_alone else source.local_rank,
        local_world_size=1 if is_alone else source.local_world_size,
        launcher=source.launcher,
        token_source=token_source(environ),
        epoch=_epoch(source, environ),
        listen_fd=number_of(environ, "FERRO_LISTEN_FD") if addr is None else None,
    )


def _check_unread(addr: str | None, environ: Environ) -> None:
    """Refuse to be a single rank if something says that there are several, but not how many.

    Bare ``prterun`` does so; Open MPI's ``mpiexec`` gives the number in its own variables.
    """
    if addr is not None:
        raise InvalidWorldSize(
            f"addr={addr!r} was given without rank and world_size, and the environment says "
            "nothing: give all three"
        )
    if environ.get("FERRO_ADDR"):
        raise InvalidWorldSize(
            f"FERRO_ADDR={environ['FERRO_ADDR']!r} is set, but nothing says which rank this is, of "
            "how many: start the job with a launcher, give rank and world_size, or unset it"
        )
    if "PMIX_RANK" in environ and not _is_counted_by_slurm(environ):
        raise InvalidWorldSize(
            "PMIX_RANK is set, but nothing says how many ranks there are: start the job with "
            "Open MPI's mpiexec (or prterun --personality ompi), or give rank and world_size."
        )


def _is_counted_by_slurm(environ: Environ) -> bool:
    # Where its default is PMIx, Slurm gives a number to a step's only task and to a shell, too.
    is_slurms = environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix.")
    return is_slurms and number_of(environ, "SLURM_STEP_NUM_TASKS") is not None


def _from_arguments(rank: int, world_size: int) -> Source:
    rank, world_size = check_place(rank, world_size)
    return Source("arguments", "rank", "world_size", rank, world_size)


def _check_argument(source: Source | None, rank: int | None, world_size: int | None) -> None:
    if isinstance(rank, str):  # where torch's init_process_group takes the backend
        raise InvalidRank(f"rank must be an integer, not {rank!r}; backend= names a kind of group")
    finding = source or "the environment says nothing"
    if rank is not None and (source is None or source.rank != rank):
        raise InvalidRank(f"rank={rank!r} was given without world_size, and {finding}: give both")
    if world_size is not None and (source is None or source.world_size != world_size):
        if source is None and type(world_size) is int and world_size == 1:
            return
        raise InvalidWorldSize(
            f"world_size={world_size!r} was given without rank, and {finding}: give both"
        )


def _from_environment(environ: Environ) -> list[Source]:
    """Return all sources that give the same place, the most reliable first."""
    sources = [source for find in FINDERS if (source := find(environ)) is not None]
    for other in sources[1:]:
        if not sources[0].agrees_with(other):
            is_same_size = sources[0].world_size == other.world_size
            error = InvalidRank if is_same_size else InvalidWorldSize
            raise error(
                f"{sources[0]}, {other}. Unset the variables that are left from something else, "
                "or give rank and world_size as arguments"
            )
    return [source for source in sources if source.is_at_place_of(sources[0])]


def _complete(sources: list[Source]) -> Source:
    """Return the first source, with what it leaves open from the others."""
    return replace(
        sources[0],
        local_rank=_first(source.local_rank for source in sources),
        local_world_size=_first(source.local_world_size for source in sources),
        num_hosts=_first(source.num_hosts for source in sources),
    )


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def _epoch(source: Source, environ: Environ) -> str:
    if source.launcher == "ferrorun":
        return environ.get("FERRO_DIST_EPOCH", "")
    if source.launcher == "torchrun":
        run = environ.get("TORCHELASTIC_RUN_ID", "")
        is_counted = source.is_single_host and "TORCHELASTIC_RESTART_COUNT" in environ
        return f"{run}.{environ['TORCHELASTIC_RESTART_COUNT']}" if is_counted else run
    if source.launcher == "slurm":
        return environ.get("SLURM_RESTART_COUNT", "")
    return ""
