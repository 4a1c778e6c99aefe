"""Hosts for tests: network namespaces of this machine, cabled to one switch.

To ferro_dist they are hosts of their own: neither a loopback address nor shared memory
leads from one to another. Only root may make them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

__all__ = ["Host", "cabled_hosts", "ip"]

_CLONE_NEWNET = 0x40000000
_CABLE = "v0"  # what it is called at the host's end
_FIREWALL = (
    "add table inet filter; add chain inet filter input { type filter hook input priority 0; };"
)


@dataclass(frozen=True)
class Host:
    """One namespace.

    Attributes
    ----------
    name : str
    address : str
        Where the other hosts reach it.
    """

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another one on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def command_with_names(self, hosts_file: str, *words: str) -> list[str]:
        """Return the same where /etc/hosts holds what `hosts_file` does."""
        script = f'mount --bind {shlex.quote(hosts_file)} /etc/hosts && exec "$@"'
        return self.command("unshare", "--mount", "sh", "-c", script, "sh", *words)

    def enter(self) -> None:
        """Move this thread, and those that it starts from here on, to this host."""
        # os.setns is younger than Python 3.10.
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.name}")

    def cut_cable(self) -> None:
        """Take the link down, as if somebody had pulled the plug: nobody is told."""
        _must("-n", self.name, "link", "set", _CABLE, "down")

    def refuse(self, host: Host) -> None:
        """Let a firewall send back all that comes from another host, with its default reason."""
        rule = f"add rule inet filter input ip saddr {host.address} reject"
        _must_run(self.command("nft", f"{_FIREWALL} {rule}"))

    def give_up_after(self, num_retries: int) -> None:
        """Give streams up sooner than the kernel's default, as clusters do to notice failures."""
        setting = f"echo {num_retries} > /proc/sys/net/ipv4/tcp_retries2"
        _must_run(self.command("sh", "-c", setting))


@contextlib.contextmanager
def cabled_hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Make hosts 10.9.0.1, 10.9.0.2, ...; skip the test, saying why, if this is not to be had."""
    if shutil.which("ip") is None:
        pytest.skip("the program ip (iproute2) is not installed")
    prefix = f"ferro{os.getpid()}"
    switch = f"{prefix}switch"
    hosts = [Host(f"{prefix}host{i}", f"10.9.0.{i + 1}") for i in range(num_hosts)]
    try:
        for name in (switch, *(host.name for host in hosts)):
            _must_or_skip("network namespaces", "netns", "add", name)
        _must_or_skip("network bridges", *f"-n {switch} link add b0 type bridge".split())
        _must(*f"-n {switch} link set b0 up".split())
        for number, host in enumerate(hosts):
            _connect(host, switch, f"p{number}")
        yield hosts
    finally:
        for name in (*(host.name for host in hosts), switch):
            ip("netns", "del", name)


def _connect(host: Host, switch: str, port: str) -> None:
    cable = f"link add {_CABLE} netns {host.name} type veth peer name {port} netns {switch}"
    _must_or_skip("virtual network cables", *cable.split())
    _must(*f"-n {switch} link set {port} master b0 up".split())
    _must(*f"-n {host.name} addr add {host.address}/24 dev {_CABLE}".split())
    _must(*f"-n {host.name} link set {_CABLE} up".split())
    _must(*f"-n {host.name} link set lo up".split())


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)


def _must_run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=30)


def _must(*words: str) -> None:
    done = ip(*words)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"


def _must_or_skip(what: str, *words: str) -> None:
    done = ip(*words)
    if done.returncode:
        pytest.skip(f"no {what} here: {done.stderr.strip()}")
