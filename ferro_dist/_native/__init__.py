"""The compiled modules; each is linked to one foreign library at most."""

import ctypes
from importlib.machinery import PathFinder

if PathFinder.find_spec(f"{__name__}.host", __path__) is None:
    raise ImportError(
        f"{__path__[0]} holds no compiled modules for this Python: it is a source tree that was "
        "not built, or was built for another one. Run pip install . in it, or leave its folder, "
        "which comes before what is installed."
    )


def _is_subinterpreter() -> bool:
    python = ctypes.pythonapi
    current, main = python.PyInterpreterState_Get, python.PyInterpreterState_Main
    current.restype = main.restype = ctypes.c_void_p
    return bool(current() != main())


# At its exit a process also runs the exit handlers of other interpreters, but lets no thread take
# their lock again: closing a group there would never return.
if _is_subinterpreter():
    raise ImportError("ferro_dist works in the main interpreter only: do not import it in others.")
