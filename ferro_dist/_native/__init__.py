"""The compiled modules: one for each library that they are linked to."""

from importlib.machinery import PathFinder

if PathFinder.find_spec(f"{__name__}.host", __path__) is None:
    raise ImportError(
        f"{__path__[0]} holds no compiled modules for this Python: it is a source tree that was "
        "not built, or for another one. Run pip install . in it, or leave its folder, which comes "
        "before what is installed."
    )
