"""What a rank tells the others about itself, and what follows from it."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ferro_dist.cores import CpuLimit, affinity_mask, count_usable, cpu_limit
from ferro_dist.rendezvous import machine
from ferro_dist.rendezvous.address import target_of
from ferro_dist.rendezvous.frame import ProtocolError, decode_json

__all__ = ["Member", "Place", "count_cores", "group_by_host"]

KINDS: dict[str, type] = {"int": int, "str": str, "bool": bool}


class Place(abc.ABC):
    """How this rank and the others find each other over the network.

    Attributes
    ----------
    own_address : str
        Where other hosts reach this rank; "" if it only knows that it is on rank 0's
        machine, because it reached rank 0 without leaving the machine.
    loopback : str
        The loopback address of the IP version in use.
    """

    own_address: str = ""
    loopback: str = "127.0.0.1"

    @abc.abstractmethod
    def addresses_of(self, rank: int, members: Sequence[Member]) -> tuple[str, ...]:
        """Return where this rank reaches each rank's host."""


@dataclass(frozen=True)
class Member:
    """What a rank tells the others about itself.

    Attributes
    ----------
    host, network : str
        See `machine.host_identity`, `machine.network_identity`.
    address, loopback : str
        See `Place`.
    cores : str
        Affinity mask, hexadecimal.
    cgroup, millicores
        See `ferro_dist.cores.CpuLimit`.
    socket : str
        Names the abstract socket at which it would serve its host's ranks.
    nonce : str
        Rank 0's identifies this attempt to connect the group.
    """

    pid: int
    host: str
    network: str
    address: str
    loopback: str
    cores: str
    cgroup: str
    millicores: int
    shared_memory: bool
    socket: str
    nonce: str

    @classmethod
    def own(cls, shared_memory: bool, place: Place) -> Member:
        """Describe this process."""
        limit = cpu_limit()
        return cls(
            pid=os.getpid(),
            host=machine.host_identity(),
            network=machine.network_identity(),
            address=place.own_address,
            loopback=place.loopback,
            cores=f"{affinity_mask():x}",
            cgroup=limit.cgroup[:256],
            millicores=limit.millicores,
            shared_memory=shared_memory,
            socket=os.urandom(16).hex(),
            nonce=os.urandom(16).hex(),
        )

    def encode(self) -> bytes:
        """Return the member for `decode`."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Member:
        """Parse what another rank has sent; raises ProtocolError."""
        facts = decode_json(body)
        kinds = {item.name: KINDS[str(item.type)] for item in fields(cls)}
        if facts.keys() != kinds.keys():
            raise ProtocolError("a member with other fields")
        if any(type(facts[name]) is not kind for name, kind in kinds.items()):
            raise ProtocolError("a member with a field of another type")
        member = cls(**facts)
        member._check()
        return member

    def _check(self) -> None:
        try:
            has_names = bool(bytes.fromhex(self.socket) and bytes.fromhex(self.nonce))
            has_cores = int(self.cores, 16) > 0 and self.millicores >= 0
            target_of(self.loopback, 1)
            if self.address:
                target_of(self.address, 1)
        except (ValueError, OSError):
            has_names = has_cores = False
        if not (has_names and has_cores):
            raise ProtocolError("a member that says nothing sensible")

    @property
    def socket_name(self) -> str:
        """Name of the abstract socket at which it would serve its host's ranks."""
        return f"\0ferro-{self.socket}"


def count_cores(members: Sequence[Member]) -> int:
    """Return how many cores members of one host may use together."""
    return count_usable(
        [int(member.cores, 16) for member in members],
        [CpuLimit(member.cgroup, member.millicores) for member in members],
    )


def group_by_host(members: Sequence[Member]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, as far as they would share memory."""
    hosts: dict[object, list[int]] = {}
    for rank, member in enumerate(members):
        hosts.setdefault(member.host if member.shared_memory else rank, []).append(rank)
    return tuple(map(tuple, hosts.values()))
