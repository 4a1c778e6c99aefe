"""Which machine this is: which processes share its memory and its loopback."""

from __future__ import annotations

import os

__all__ = ["host_identity", "network_identity"]

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
