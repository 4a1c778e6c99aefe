"""Where rank 0 listens: how an address is written, parsed, derived, bound and dialled.

An address is ``host:port``, ``[IPv6]:port`` or ``unix:@name``. Several may be given,
separated by commas: rank 0 takes the first that is free, the others try all of them
and know by authentication which one is their group's.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ferro_dist import network_interfaces
from ferro_dist.errors import NoConnection
from ferro_dist.network_interfaces import format_host_port, is_literal, is_loopback

__all__ = [
    "Address",
    "Target",
    "derived_addr",
    "derived_ports",
    "derived_unix_addr",
    "digest_of",
    "is_taken",
    "listen",
    "listening_targets",
    "parse_addresses",
    "resolve",
    "target_of",
    "wildcard_target",
]

# Below Linux's ephemeral ports (32768 and up): an outgoing connection of any program
# could hold one of those, and a dial to one can even connect to itself.
DERIVED_PORTS = range(15000, 32000)
DERIVED_COUNT = 4
RESOLVE_PAUSE_S = 0.25
RESOLVER_THREAD = "ferro-resolver"
BACKLOG = 4096


@dataclass(frozen=True)
class Address:
    """One address as it was written; `port` is 0 for an abstract unix socket."""

    text: str
    host: str
    port: int
    is_unix: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the host is a name that must be looked up, other than localhost."""
        return not (self.is_unix or self.host == "localhost" or is_literal(self.host))


@dataclass(frozen=True)
class Target:
    """What `socket.bind` and `socket.connect` take."""

    family: socket.AddressFamily
    sockaddr: Any

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return self.family == socket.AF_UNIX or is_loopback(self.sockaddr[0])

    def __str__(self) -> str:
        if self.family == socket.AF_UNIX:
            return "an abstract unix socket"
        return format_host_port(self.sockaddr[0], self.sockaddr[1])


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Parse one address, or several separated by commas.

    Raises
    ------
    NoConnection
        One of them is not an address, or its port is 0.
    """
    if not isinstance(text, str):
        raise NoConnection(f"addr must be a string such as 'node0:29500', got {text!r}")
    parsed = tuple(_parse_address(part.strip()) for part in text.split(","))
    return tuple(dict.fromkeys(parsed))


def _parse_address(text: str) -> Address:
    if text.startswith("unix:"):
        return _parse_unix(text)
    host, separator, port_text = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_host = host.isprintable() and (":" not in host or is_bracketed)
    if not separator or not host or not is_host:
        raise NoConnection(
            f"{text!r} is not an address: write host:port, [IPv6 address]:port or unix:@name"
        )
    host = host[1:-1] if is_bracketed else host
    if is_bracketed and not is_literal(host):
        raise NoConnection(f"{text!r} is not an address: {host!r} is no IPv6 address")
    return Address(text, host, _parse_port(port_text, text))


def _parse_unix(text: str) -> Address:
    name = text.removeprefix("unix:")
    if not name.startswith("@") or not 1 < len(name) <= 100 or not name.isprintable():
        raise NoConnection(
            f"{text!r} is not an address: write unix:@name, an abstract socket that leaves no file"
        )
    return Address(text, name[1:], 0, is_unix=True)


def _parse_port(text: str, address: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        raise NoConnection(f"{address!r} is not an address: {text!r} is no port (1 to 65535)")
    if int(text) == 0:
        raise NoConnection(
            f"{address!r}: port 0 means any free port, and the other ranks could not know which; "
            "name a port, or start the ranks with ferrorun, which finds one"
        )
    return int(text)


def derived_addr(host: str, *key: object) -> str:
    """Return addresses on `host` that all who know `key` agree on.

    Parameters
    ----------
    host : str
        Name or address of the machine where rank 0 runs.
    *key : object
        What distinguishes this group from every other on that host: job, step, epoch.

    Returns
    -------
    str
        Several addresses, in case the first is taken.
    """
    return ",".join(format_host_port(host, port) for port in derived_ports(host, *key))


def derived_ports(*key: object) -> list[int]:
    """Return the ports of `derived_addr`, for ranks that know a host by different names."""
    digest = digest_of(*key)
    draws = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 32, 4))
    ports = dict.fromkeys(DERIVED_PORTS[draw % len(DERIVED_PORTS)] for draw in draws)
    return list(ports)[:DERIVED_COUNT]


def derived_unix_addr(*key: object) -> str:
    """Return the address of a group whose ranks are all on one host; see `derived_addr`."""
    return f"unix:@{digest_of(*key).hex()[:32]}"


def digest_of(*key: object) -> bytes:
    """Return 32 bytes that are the same wherever `key` is, and different for any other."""
    return hashlib.sha256(repr([str(part) for part in key]).encode()).digest()


def resolve(address: Address, token: bytes, until: float) -> list[Target]:
    """Look an address up; try again up to `until` while its name is not known.

    Raises
    ------
    NoConnection
        The name is still not known.
    """
    if address.is_unix:
        return [Target(socket.AF_UNIX, _abstract_name(address.host, token))]
    while True:
        found = _look_up(address, until)
        if not isinstance(found, OSError):
            return found
        pause = min(RESOLVE_PAUSE_S, until - time.monotonic())
        if pause <= 0 or not address.is_named:
            raise NoConnection(f"{address.text}: {address.host!r} is not known: {found}")
        time.sleep(pause)


def _abstract_name(name: str, token: bytes) -> str:
    # Only those who know the token know the name, so that no other user can take it first.
    return "\0ferro-" + hmac.digest(token, b"ferro unix " + name.encode(), "sha256").hex()[:32]


def _look_up(address: Address, until: float) -> list[Target] | OSError:
    if not address.is_named:
        return _getaddrinfo(address)
    # The resolver can neither be interrupted nor given a deadline: leave it to a thread.
    answers: list[list[Target] | OSError] = []
    thread = threading.Thread(
        target=lambda: answers.append(_getaddrinfo(address)), name=RESOLVER_THREAD, daemon=True
    )
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    return answers[0] if answers else TimeoutError("the name service does not answer")


def _getaddrinfo(address: Address) -> list[Target] | OSError:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        return OSError(str(error))
    except OSError as error:
        return error
    targets = [Target(family, sockaddr) for family, _, _, _, sockaddr in found]
    # IPv4 first: where localhost has both, rank 0 binds the one that every rank has.
    return sorted(dict.fromkeys(targets), key=lambda target: target.family != socket.AF_INET)


def listening_targets(targets: Sequence[Target]) -> list[Target]:
    """Return where to listen, if a name leads to `targets`; see `network_interfaces.of_name`."""
    chosen = network_interfaces.of_name([(target.family, target.sockaddr) for target in targets])
    return [_target(*interface) for interface in chosen]


def wildcard_target(port: int) -> Target:
    """Every interface, over both IPv6 and IPv4 where the machine has them."""
    return _target(*network_interfaces.everywhere(port))


def _target(family: int, sockaddr: Any) -> Target:
    return Target(socket.AddressFamily(family), sockaddr)


def target_of(host: str, port: int) -> Target:
    """Return the target of a literal address, its scope included."""
    found = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )
    return Target(found[0][0], found[0][4])


def listen(target: Target) -> socket.socket:
    """Bind and listen. Raises OSError."""
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        if target.family == socket.AF_UNIX:
            sock.bind(target.sockaddr)
        else:
            network_interfaces.bind(sock, target.sockaddr)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def is_taken(error: OSError) -> bool:
    """Whether binding failed because somebody else is there."""
    return error.errno == errno.EADDRINUSE
