"""Where rank 0 listens, from what a launcher has left in the environment.

If no address is given, ranks derive one from what all ranks of the job know and no other job has.
"""

from __future__ import annotations

import os
import re

from ferro_dist.errors import NoConnection
from ferro_dist.network_interfaces import format_host_port
from ferro_dist.rendezvous.address import (
    derived_addr,
    derived_unix_addr,
    parse_addresses,
)
from ferro_dist.rendezvous.launchers import Environ, Source, number_of

__all__ = ["find_addr", "first_host"]

# MPICH's launcher that forks all ranks itself, on its own host, and tells them nothing of hosts.
GFORKER = "mpiexec.gforker"
# Processes between a launcher and its ranks may be shells; these are the launchers' own.
LAUNCHER_PROCESSES = frozenset(
    {"hydra_pmi_proxy", "mpiexec", "mpirun", "orted", "prted", "prterun", GFORKER}
)


def find_addr(sources: list[Source], addr: str | None, environ: Environ) -> str:
    """Return `addr`, else what the environment says, else what ranks of this job derive.

    Raises NoConnection if nothing says where rank 0 is, or what does is no address.
    """
    given = addr if addr is not None else environ.get("FERRO_ADDR")
    if given is None:
        derived = (_derive_addr(source, environ) for source in sources)
        given = next((addr for addr in derived if addr is not None), None)
    if given is None:
        raise NoConnection(
            f"{sources[0]}, and nothing says where rank 0 listens: set FERRO_ADDR=host:port on "
            "every rank, host being where rank 0 runs, or pass addr"
        )
    parse_addresses(given)
    return given


def _derive_addr(source: Source, environ: Environ) -> str | None:
    if source.launcher in ("arguments", "torchrun"):
        return _torchrun_addr(source, environ)
    job = _job_key(source, environ)
    if job is None:
        return None
    if source.is_single_host or job[0] == GFORKER:
        return derived_unix_addr(source.launcher, *job)
    if source.launcher == "slurm" and environ.get("SLURM_STEP_NODELIST"):
        return derived_addr(first_host(environ["SLURM_STEP_NODELIST"]), "slurm", *job)
    return None


def _torchrun_addr(source: Source, environ: Environ) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        return None
    own = format_host_port(host.strip("[]"), _master_port(port))
    run = (environ.get("TORCHELASTIC_RUN_ID", ""), own)
    if source.is_single_host and "TORCHELASTIC_RUN_ID" in environ:
        # The agents of several hosts do not count restarts alike, but here there is only one.
        return derived_unix_addr("torchrun", *run, environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    derived = derived_addr(host.strip("[]"), "torchrun", *run)
    # The agent holds MASTER_PORT for its store. Without an agent, it is free unless
    # torch.distributed is in use as well.
    is_held = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return derived if is_held else f"{own},{derived}"


def _master_port(text: str) -> int:
    port = number_of({"port": text}, "port")
    if port is None or not 1 <= port <= 65535:
        raise NoConnection(f"MASTER_PORT={text!r} is no port (1 to 65535)")
    return port


def _job_key(source: Source, environ: Environ) -> tuple[str, ...] | None:
    """Return what all ranks of the job know, and no other job has."""
    if source.launcher == "slurm":
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return tuple(environ.get(name, "") for name in names)
    if source.launcher == "openmpi" and environ.get("PMIX_NAMESPACE"):
        return (environ["PMIX_NAMESPACE"],)
    process = _launcher_process()
    return process if source.is_single_host or (process and process[0] == GFORKER) else None


def _launcher_process() -> tuple[str, ...] | None:
    """Return name, process id and start time of the launcher that this process descends from."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            return None
        name = text[text.index("(") + 1 : text.rindex(")")]
        facts = text[text.rindex(")") + 2 :].split()
        if name in LAUNCHER_PROCESSES:
            return name, str(pid), facts[19]
        pid = int(facts[1])
    return None


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as ``"rack[1-2]node[07,09-12],login"``.

    Raises
    ------
    NoConnection
        It is not a node list.
    """
    end, depth = len(nodelist), 0
    for at, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = at
            break
    # In each bracket, the first number belongs to the first host; it keeps its zeros.
    host = re.sub(r"\[([^\[\],-]+)[^\[\]]*\]", r"\1", nodelist[:end]).strip()
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", host):
        raise NoConnection(f"SLURM_STEP_NODELIST={nodelist!r} is no list of hosts")
    return host
