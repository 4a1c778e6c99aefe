"""Whether a group can be used, and can move a module's arrays; checked before anything is sent."""

from __future__ import annotations

from ferro_dist.backends.base import Backend
from ferro_dist.errors import ChannelClosed, InvalidArray

__all__ = ["check_group", "check_reach"]


def check_group(op: str, group: object, name: str = "backend", hint: str = "") -> None:
    """Raise TypeError or ChannelClosed unless this argument is a group that can be called.

    The hint, if any, ends the message for what is no group at all.
    """
    if not isinstance(group, Backend):
        raise TypeError(
            f"{op}: {name} must be a group, such as fd.init() or fd.HostBackend(...) makes, not "
            f"{'None' if group is None else type(group).__name__}{hint}"
        )
    if group.is_closed:
        raise ChannelClosed(f"{op}: the group given as {name} is closed. Make a new one.", op=op)


def check_reach(what: str, device: int | None, backend: Backend) -> None:
    """Raise InvalidArray unless the group moves arrays that are where this one is.

    Parameters
    ----------
    what : str
        Names the array: ``"parameter 'weight'"``.
    device : int or None
        The GPU that it is on; None if it is in host memory.
    backend : Backend
    """
    group = type(backend).__name__
    if device is None and not backend.moves_host_arrays:
        problem = (
            f"is in host memory, but {group} moves only GPU arrays. Move the module to GPU "
            f"{backend.device}, or use a HybridBackend, which moves both"
        )
    elif device is not None and backend.device is None:
        problem = (
            f"is on GPU {device}, but {group} moves arrays in host memory. Use a HybridBackend or "
            "an NcclBackend, or keep the module on the CPU"
        )
    elif device is not None and device != backend.device:
        problem = (
            f"is on GPU {device}, but this rank's GPU in the group is {backend.device}. "
            "Move the module there, or make the group with device=..."
        )
    else:
        return
    raise InvalidArray(f"DDP: {what} {problem}.", op="DDP", rank=backend.rank)
