"""At which of this machine's interfaces rank 0 listens, and how that is written.

Used by ferrorun before a rank exists, and by the rendezvous.
"""

from __future__ import annotations

# The C module below socket: ferrorun has no time to load the rest.
import _socket as socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Interface = tuple[int, Any]  # address family, and what bind() takes

__all__ = [
    "bind",
    "everywhere",
    "format_host_port",
    "is_literal",
    "is_loopback",
    "is_wildcard",
    "of_name",
]


def is_literal(host: str) -> bool:
    """Whether `host` is an address, and no name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except OSError:
            continue
        return True
    return False


def is_loopback(host: str) -> bool:
    """Whether `host`, a literal address, reaches only this machine."""
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for every interface."""
    return host in ("0.0.0.0", "::")


def format_host_port(host: str, port: int | str) -> str:
    """Write ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def everywhere(port: int) -> Interface:
    """Every interface, over both IPv6 and IPv4 where the machine has them."""
    if os.path.exists("/proc/net/if_inet6"):
        return socket.AF_INET6, ("::", port)
    return socket.AF_INET, ("0.0.0.0", port)


def of_name(found: Sequence[Interface]) -> Sequence[Interface]:
    """Return the addresses to try for a name that resolved to `found`; binding one suffices.

    The other hosts may look the name up elsewhere, and be told only some of them. Above all,
    Debian's /etc/hosts gives the machine's own name a loopback address, which would shut them out.
    """
    own = [interface for interface in found if _is_own(interface)]
    if not own:
        return found  # a name of some other machine: listening will fail, and tell why
    is_unambiguous = len(own) == 1 and not is_loopback(own[0][1][0])
    return own if is_unambiguous else [everywhere(found[0][1][1])]


def _is_own(interface: Interface) -> bool:
    family, (host, _, *scope) = interface
    try:
        with_any_port = socket.socket(family, socket.SOCK_STREAM)
        try:
            with_any_port.bind((host, 0, *scope))
        finally:
            with_any_port.close()
    except OSError:
        return False
    return True


def bind(sock: socket.socket, sockaddr: Any) -> None:
    """Bind a socket for a server."""
    # Without it, a port is refused for a minute after the previous group has closed it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6 and is_wildcard(sockaddr[0]):
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(sockaddr)
