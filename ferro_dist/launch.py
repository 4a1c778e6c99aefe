"""ferrorun: start the ranks of a job on this host, and leave nothing behind.

Three kinds of process take part. Any of them may be killed at any moment.

front
    What the user's shell started. It owns the terminal and turns each signal into
    one byte on the control pipe.
supervisor
    The front's child, in a process group of its own, out of reach of the terminal.
    It starts the ranks, copies their output and reaps them. End of file on the
    control pipe means that the front is dead: everything is killed.
ranks
    The supervisor's children, each in its own process group. The kernel kills them
    when the supervisor dies (PR_SET_PDEATHSIG).

Front and supervisor are both subreapers: a process that a rank left behind, even one
that made itself a daemon, becomes the child of whichever of the two is alive, where it
is found and stopped.

None of this imports anything of ferro_dist but `cores` and `network_interfaces`, nor argparse,
dataclasses, typing or subprocess, which take longer to load than two ranks take to start.
"""

from __future__ import annotations

import os
import sys

import ferro_dist
from ferro_dist._launch.command_line import LaunchError, parse, usable_cores
from ferro_dist._launch.front import run_job
from ferro_dist._launch.kernel import complain, open_standard_fds, show
from ferro_dist._launch.plan import Rendezvous, describe, plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

USAGE = """\
usage: ferrorun [options] script.py [arguments]
       ferrorun [options] -m module [arguments]
       ferrorun [options] --no-python command [arguments]

Start the ranks of a job on this host. Each line of their output is marked with the
rank it comes from. The first rank that fails ends the job and gives it its exit code.
Processes that the ranks leave behind are stopped when the last rank has ended.
Signals are passed on to all ranks, which may take their time or ignore them. The second
Ctrl-C (SIGINT) kills them.

  -n, --nproc N          ranks on this host (default: its usable cores); also -np and
                         --nproc-per-node, as other launchers have it
  -m, --module           run a module, as python -m does
      --no-python        run any command instead of a Python script
      --env KEY=VALUE    set a variable for every rank; may be repeated
      --bind-to core     bind each rank to one core, in turn (default: none)
      --log-dir DIR      also write each rank's output to DIR/rank<N>.log
      --emulate-gpu      give every rank emulated GPUs in place of CUDA and NCCL
      --keep-going       a rank that a signal kills does not end the job while others run:
                         they can go on in the group that shrink() makes, and give the
                         job its exit code
      --dry-run          print what would be run, and run nothing
      --version          print the version of ferro_dist
  -h, --help             print this text

Several hosts; run ferrorun once on each, with the same -n and FERRO_DIST_TOKEN:
      --nnodes N               number of hosts (default: 1)
      --node-rank I            which of them this is, from 0 (default: 0)
      --rdzv-endpoint H:P      address of host 0 and a free port there; the next port
                               is announced as MASTER_PORT

Each rank finds its place in FERRO_RANK, FERRO_WORLD_SIZE, FERRO_LOCAL_RANK and
FERRO_LOCAL_WORLD_SIZE, and in torchrun's RANK, LOCAL_RANK and so on. Unless set before,
OMP_NUM_THREADS is its share of the cores, and PYTHONUNBUFFERED is 1.

exit code: that of the first rank that fails (128 + number for a signal), or, if this one
has only lost another rank, of the one it lost; 2 for a bad option; 127 for a command that
cannot be found, 126 for one that cannot be run; 141 when nobody reads the output any
more; 1 when a port or file is not available.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv[1:]``) and return the exit code."""
    open_standard_fds()
    try:
        options = parse(sys.argv[1:] if argv is None else argv, os.environ, usable_cores())
        if options.wants_help:
            show(USAGE)
            return 0
        if options.wants_version:
            show(f"ferrorun of ferro_dist {ferro_dist.__version__}\n")
            return 0
        if options.is_dry_run:
            show(describe(plan(options, Rendezvous.placeholder(options), os.environ)))
            return 0
    except LaunchError as error:
        complain(str(error))
        return error.exit_code
    return run_job(options)


if __name__ == "__main__":
    sys.exit(main())
