"""The job's ports, taken before a rank exists so that no other process can take them."""

from __future__ import annotations

# The C module below socket, whose enums and selectors alone take 4 ms to load.
import _socket as socket
import os

from ferro_dist._launch.command_line import LaunchError
from ferro_dist._launch.plan import Rendezvous, join_host_port

TYPE_CHECKING = False
if TYPE_CHECKING:
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
        addr = join_host_port(LOOPBACK, listener.getsockname()[1])
        master_port = str(master.getsockname()[1])
        listening = _listen(listener)
        rendezvous = Rendezvous(addr, LOOPBACK, master_port, token, str(listening))
        return rendezvous, [listening, master.detach()]
    host, port = options.endpoint
    addr, master_port = join_host_port(host, port), str(port + 1)
    if options.node_rank > 0:
        return Rendezvous(addr, host, master_port, token, None), []
    listening = _listen(_bind(host, port))
    return Rendezvous(addr, host, master_port, token, str(listening)), [listening]


def _listen(bound: socket.socket) -> int:
    bound.listen(socket.SOMAXCONN)
    return bound.detach()


def _resolve(host: str, port: int) -> tuple[int, Any]:
    if host == LOOPBACK:
        # getaddrinfo would load Python's IDNA tables: 10 ms.
        return socket.AF_INET, (host, port)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, address


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, address = _resolve(host, port)
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(
            f"cannot listen on {join_host_port(host, port)}: {reason}. "
            "Host 0 needs an address of its own and a free port there.",
            EXIT_CANNOT_LISTEN,
        ) from None
    return bound
