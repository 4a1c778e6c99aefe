"""A torch module around another one, in whose place it stands.

torch gives a module that contains another its own names for everything: ``module.weight``. Here
parameters, buffers, parts and the saved state have the names that they have in the module inside,
and attributes of that module are read and written through the wrapper. Its own are what its class
defines, what is in its ``__dict__``, and the hooks of its call.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11

__all__ = ["ModuleWrapper"]

KEY = "module"  # of the module inside, among the wrapper's parts
PREFIX = f"{KEY}."
# The user's hooks of the wrapper; those of its state are the module's.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward", "_is_full_backward_hook")


def _of_module(name: str) -> Any:
    """Return a method that calls the one of this name of the module inside."""

    def method(self: ModuleWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    method.__name__, method.__qualname__ = name, f"ModuleWrapper.{name}"
    method.__doc__ = f"Do what ``{name}`` of the module does."
    return method


class ModuleWrapper(torch.nn.Module):
    """Stands for the module that `_hold` has put into it."""

    @property
    def module(self) -> Any:
        """The module inside; None once it was let go."""
        return self._held

    # Parameters, buffers and parts. What is added to the wrapper is added to the module.

    register_buffer = _of_module("register_buffer")
    register_parameter = _of_module("register_parameter")
    add_module = _of_module("add_module")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, Any]]:
        """Yield the parameters by the names that they have in the module.

        Without `recurse` there are none: the wrapper's own are the module's, which `modules` yields
        next. Whoever asks each of these for its own parameters must get every one once.
        """
        return self.module.named_parameters(prefix, True, *args, **kwargs) if recurse else iter(())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, Any]]:
        """Yield the buffers by the names that they have in the module, as `named_parameters`."""
        return self.module.named_buffers(prefix, True, *args, **kwargs) if recurse else iter(())

    def named_modules(
        self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield this wrapper, then the module and its parts by the names that they have in it.

        So the names of an enclosing module's parameters are those of its ``state_dict``, too.
        """
        seen = set() if memo is None else memo
        if remove_duplicate and self in seen:
            return
        seen.add(self)
        yield prefix, self
        if self._held is not None:
            yield from self._held.named_modules(seen, prefix, remove_duplicate)

    # The state, whose hooks are called by the module.

    register_state_dict_pre_hook = _of_module("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_module("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_module("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_module("register_load_state_dict_post_hook")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module."""
        state = self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix") or "".join(args[1:2])
        if prefix:
            _add_versions(state, prefix)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of the module, also one whose names begin with ``module.``."""
        module = self.module
        if isinstance(state_dict, Mapping) and _is_of_wrapper(state_dict, module):
            state_dict = _without_prefix(state_dict)
        return module.load_state_dict(state_dict, strict=strict, assign=assign)

    # Attributes

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that the wrapper lacks.
        try:
            return torch.nn.Module.__getattr__(self, name)
        except AttributeError:
            if name.startswith("__") or "_modules" not in self.__dict__:
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes that are read through the wrapper are also written through it.
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif self._has_own(name) or KEY not in self.__dict__.get("_modules", ()):
            torch.nn.Module.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if isinstance(getattr(type(self), name, None), property):
            object.__delattr__(self, name)
        elif self._has_own(name):
            torch.nn.Module.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def _has_own(self, name: str) -> bool:
        return hasattr(type(self), name) or name in self.__dict__

    # For subclasses: what is inside

    @property
    def _held(self) -> Any:
        return self._modules.get(KEY)

    def _hold(self, module: torch.nn.Module) -> None:
        # Not by `setattr`, which sets attributes of the module.
        self._modules[KEY] = module
        self.training = module.training
        torch.nn.Module.register_load_state_dict_pre_hook(self, _add_prefix)

    def _let_go(self) -> None:
        self._modules[KEY] = None

    def _copy_without_module(self, memo: dict[int, Any]) -> Self:
        """Return a copy that has the user's hooks, and in which a module is yet to be held."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        torch.nn.Module.__init__(twin)
        twin.__dict__.update(
            (name, copy.deepcopy(hooks, memo))
            for name, hooks in self.__dict__.items()
            if name.startswith(HOOKS)
        )
        return twin


def _is_of_wrapper(state: Iterable[str], module: Any) -> bool:
    """Whether ``module.`` before names of a state stands for a wrapper, not for a child."""
    own = module.state_dict().keys()
    if not any(name.startswith(PREFIX) for name in own):
        return True
    bare = {name.removeprefix(PREFIX) for name in state}
    return len(own & bare) > len(own & set(state))


def _without_prefix(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state of the module, from one that may be that of a wrapper."""
    bare = OrderedDict((name.removeprefix(PREFIX), value) for name, value in state.items())
    # The versions of the module's parts, by which they know what an earlier version has saved.
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        if bare.keys() != state.keys():
            versions = {
                name.removeprefix(KEY).removeprefix("."): version
                for name, version in versions.items()
                if f"{name}.".startswith(PREFIX)
            }
        bare._metadata = versions  # type: ignore[attr-defined]
    return bare


def _add_versions(state: Any, prefix: str) -> None:
    """Add the versions of a module's parts by the names under which an enclosing one loads them."""
    versions = getattr(state, "_metadata", {})
    for name in [name for name in versions if f"{name}.".startswith(prefix)]:
        inner = f"{prefix}{PREFIX}{name.removeprefix(prefix[:-1]).removeprefix('.')}"
        versions.setdefault(inner.removesuffix("."), versions[name])


def _add_prefix(wrapper: ModuleWrapper, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename what an enclosing module loads into the wrapper, to where its module is."""
    inner = {
        name.removeprefix(prefix): state.pop(name)
        for name in list(state)
        if name.startswith(prefix)
    }
    is_of_wrapper = _is_of_wrapper(inner, wrapper.module)
    for name, value in inner.items():
        bare = name.removeprefix(PREFIX) if is_of_wrapper else name
        state[prefix + PREFIX + bare] = value
