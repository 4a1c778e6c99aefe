"""The compiled modules; each is linked to one foreign library at most."""

from importlib.machinery import PathFinder

if PathFinder.find_spec(f"{__name__}.host", __path__) is None:
    raise ImportError(
        f"{__path__[0]} holds no compiled modules for this Python: it is a source tree that was "
        "not built, or was built for another one. Run pip install . in it, or leave its folder, "
        "which comes before what is installed."
    )
