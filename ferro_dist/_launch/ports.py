"""The job's ports, taken before a rank exists so that no other process can take them."""

from __future__ import annotations

# The C module below socket, whose enums and selectors alone take 4 ms to load.
import _socket as socket
import errno
import os

from ferro_dist import network_interfaces
from ferro_dist._launch.command_line import LaunchError
from ferro_dist._launch.plan import Rendezvous

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ferro_dist._launch.command_line import Options

EXIT_CANNOT_LISTEN = 1
LOOPBACK = "127.0.0.1"


def listen(options: Options) -> tuple[Rendezvous, list[int]]:
    """Take the job's ports.

    Rank 0 inherits the listening socket. MASTER_PORT is for torch, which insists on
    binding it itself: a bound socket that does not listen keeps the kernel from
    giving the port to others, and SO_REUSEADDR lets torch have it nevertheless.

    Returns
    -------
    rendezvous : Rendezvous
    sockets : list of int
        Descriptors: the listening socket first, if this host has rank 0; keep the rest
        open for as long as the job runs.
    """
    token = options.token or os.urandom(32).hex()
    if options.endpoint is None:
        listener, master = _bind(LOOPBACK, 0), _bind(LOOPBACK, 0)
        if options.nproc > 1:
            _check_route(*listener.getsockname())
        addr = network_interfaces.format_host_port(LOOPBACK, listener.getsockname()[1])
        master_port = str(master.getsockname()[1])
        listening = _listen(listener)
        rendezvous = Rendezvous(addr, LOOPBACK, master_port, token, str(listening))
        return rendezvous, [listening, master.detach()]
    host, port = options.endpoint
    addr, master_port = network_interfaces.format_host_port(host, port), str(port + 1)
    if options.node_rank > 0:
        return Rendezvous(addr, host, master_port, token, None), []
    listening = _listen(_bind(host, port))
    return Rendezvous(addr, host, master_port, token, str(listening)), [listening]


def _check_route(host: str, port: int) -> None:
    """Raise LaunchError where no rank could reach another, and all would wait for their timeout."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.connect((host, port))  # sends nothing
    except OSError as error:
        hint = ""
        if error.errno == errno.ENETUNREACH:
            hint = (
                ". The loopback interface is down, as in a new network namespace; try: "
                "ip link set lo up"
            )
        raise LaunchError(
            f"the ranks cannot reach {host}: {error.strerror}{hint}", EXIT_CANNOT_LISTEN
        ) from None
    finally:
        sock.close()


def _listen(bound: socket.socket) -> int:
    bound.listen(socket.SOMAXCONN)
    return bound.detach()


def _bind(host: str, port: int) -> socket.socket:
    try:
        return _bind_first(_interfaces(host, port))
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(
            f"cannot listen on {network_interfaces.format_host_port(host, port)}: {reason}. "
            "Host 0 needs an address of its own and a free port there.",
            EXIT_CANNOT_LISTEN,
        ) from None


def _interfaces(host: str, port: int) -> Sequence[tuple[int, Any]]:
    if host == LOOPBACK:
        # getaddrinfo would load Python's IDNA tables: 10 ms.
        return [(socket.AF_INET, (host, port))]
    found = [(f, address) for f, _, _, _, address in _look_up(host, port)]
    is_named = host != "localhost" and not network_interfaces.is_literal(host)
    return network_interfaces.of_name(found) if is_named else found


def _look_up(host: str, port: int) -> list[Any]:
    found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # IPv4 first, as the ranks do: where localhost has both, it is the one that every host has.
    return sorted(found, key=lambda info: info[0] != socket.AF_INET)


def _bind_first(candidates: Sequence[tuple[int, Any]]) -> socket.socket:
    """Return a socket bound to the first that this host has; raise OSError if that is taken."""
    outcome: socket.socket | OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for family, address in candidates:
        outcome = _try_to_bind(family, address)
        if not isinstance(outcome, OSError) or outcome.errno == errno.EADDRINUSE:
            break
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def _try_to_bind(family: int, address: Any) -> socket.socket | OSError:
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return error
    try:
        network_interfaces.bind(sock, address)
    except OSError as error:
        sock.close()
        return error
    return sock
