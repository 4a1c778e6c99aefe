"""Which processes share a machine, its memory and its loopback."""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["host_identity", "network_identity", "peer_credentials"]

# Shared memory needs the first two (futexes and process ids mean the same), the abstract
# socket over which it is passed needs the third, and permission the fourth.
NAMESPACES = ("ipc", "pid", "net", "user")


def host_identity() -> str:
    """Return a text that is the same for two processes if and only if they can share memory."""
    parts = [_namespace(name) for name in NAMESPACES]
    return ":".join([_boot_id(), *parts, str(os.geteuid())])


def network_identity() -> str:
    """Return a text that is the same for two processes if the same loopback reaches them."""
    return f"{_boot_id()}:{_namespace('net')}"


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process and user id of the other end of a Unix socket. Raises OSError."""
    ucred = struct.Struct("3i")  # the third is the group id
    pid, uid, _ = ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size))
    return pid, uid


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return _unknown_id()


def _namespace(name: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{name}").st_ino)
    except OSError:
        return _unknown_id()


def _unknown_id() -> str:
    # What cannot be known is assumed to differ: TCP works in either case.
    return os.urandom(8).hex()
