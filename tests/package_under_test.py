"""Chooses the ferro_dist that is tested, when it is imported: before the package itself.

``python -m pytest`` searches the current directory first. A source tree that is not built there
would hide the installed package, from the tests and from the programs that they start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__: list[str] = []

_TREE = Path(__file__).parents[1]

if not any(_TREE.glob("ferro_dist/_native/host.*.so")):
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != _TREE]
    os.environ["PYTHONSAFEPATH"] = "1"  # since Python 3.11
