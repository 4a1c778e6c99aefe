"""When a backward begins, when each gradient is there, and when the outermost backward ends.

autograd reports each by a hook, and no hook is enough on its own:

- A hook on the outputs of forward fires first, in the graph task in which the loss is
  differentiated. A callback that is queued there runs when that task ends, whatever backward
  passes were nested in it (re-entrant checkpointing runs one for each segment).
- A hook on each parameter fires when its gradient has been added to ``grad``. Where no output was
  seen, because an object hides it or because the module was called without its wrapper, the first
  of these opens the round, and the end of its own graph task closes it.

`torch.autograd.grad` also fires hooks of outputs, but accumulates nothing: it is recognized by
asking the engine whether it will reach any parameter at all.

A backward that raises before it reaches an output, in what the loss adds to the graph, calls none
of them: it cannot be told from one of another model, or from a forward without backward.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from ferro_dist.integrations.torch.inference_mode import outside_inference_mode
from ferro_dist.integrations.torch.outputs import find_tensors
from ferro_dist.integrations.torch.uncompiled import uncompiled

__all__ = [
    "BackwardWatcher",
    "refuse_compiled",
    "refuse_differentiable",
    "refuse_inner",
    "refuse_watched",
]

Tensor: TypeAlias = Any

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_RUN_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__


class BackwardWatcher:
    """Calls `on_begin` and `on_end` around each backward; `on_failure` if it raises.

    Parameters
    ----------
    on_begin : callable
        Called with the parameter whose gradient came before the backward was noticed, or None. It
        may watch other parameters from then on. Returns a function to be called with the number of
        each gradient that is ready.
    on_end : callable
    on_failure : callable
    """

    def __init__(
        self,
        on_begin: Callable[[Tensor], Callable[[int], object]],
        on_end: Callable[[], object],
        on_failure: Callable[[], object],
    ) -> None:
        self.is_open = False
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_failure = on_failure
        # Gradients on the CPU and on GPUs come on different threads.
        self._opening = threading.Lock()
        self._end_of_task: weakref.ref[Any] | None = None
        self._handles: list[Any] = []
        self._passed_leaves: list[RemovableHandle] = []
        self._parameters: list[Tensor] = []
        self._accumulators: dict[int, Any] = {}
        self._hook_tables: list[Any] = []
        self._hook_ids: list[int] = []
        self._num_hooks = -1
        self._is_stopped = True
        self._abandoned: list[weakref.ref[Any]] = []

    def watch_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Watch the gradients of these parameters, and no others any more."""
        self.stop()
        self._is_stopped = False
        self._parameters = list(parameters)
        for number, parameter in enumerate(parameters):
            hook = self._hook_of(number)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._hook_tables = [parameter._post_accumulate_grad_hooks for parameter in parameters]
        self._hook_ids = [handle.id for handle in self._handles]
        self._num_hooks = RemovableHandle.next_id

    def watched(self) -> set[int]:
        """Return the ids of the parameters that are watched."""
        return set(map(id, self._parameters))

    def is_followed(self) -> bool:
        """Whether others have registered hooks since, which run later than this one's."""
        # torch counts the hooks of everything: nearly always there are no new ones to look for.
        num_hooks = RemovableHandle.next_id
        if num_hooks == self._num_hooks:
            return False
        # The number of a parameter's hooks does not tell: one may be removed and another added.
        if list(map(next, map(reversed, self._hook_tables))) != self._hook_ids:
            return True
        self._num_hooks = num_hooks
        return False

    def come_last(self) -> None:
        """Run after all other hooks of a gradient. Not to be called while any of them runs."""
        if self.is_followed():
            self.watch_parameters(self._parameters)

    def watch_outputs(self, outputs: object) -> None:
        """Notice when a backward reaches any of these outputs of forward."""
        num_hooks, num_own = RemovableHandle.next_id, 0
        leaves: list[RemovableHandle] = []
        hook = functools.partial(self._on_output_gradient, leaves)
        for tensor in find_tensors(outputs):
            # Inside of torch.func a graph is differentiated on the spot, and its tensors are
            # wrappers: whatever comes of it reaches the parameters later.
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                continue
            # A leaf, such as an input that forward returns, keeps its hook beyond this graph.
            if tensor.is_leaf and self._is_hooked(tensor):
                continue
            handle = tensor.register_hook(hook)
            num_own += 1
            if tensor.is_leaf:
                leaves.append(handle)
        if self._num_hooks == num_hooks and RemovableHandle.next_id == num_hooks + num_own:
            self._num_hooks += num_own  # none of which is a parameter's

    def _is_hooked(self, tensor: Tensor) -> bool:
        hooks = (tensor._backward_hooks or {}).values()
        return any(getattr(hook, "func", None) == self._on_output_gradient for hook in hooks)

    def stop(self) -> None:
        """Watch no gradient any more."""
        self._is_stopped = True  # for hooks of outputs, which last as long as the graph
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parameters = []
        self._accumulators.clear()
        self._hook_tables = []
        self._hook_ids = []

    def abandon(self) -> None:
        """Watch no gradient any more, and refuse the backward of forwards that are under way."""
        self._abandoned = list(map(weakref.ref, self._parameters))
        self.stop()

    def _hook_of(self, number: int) -> Callable[[Tensor], None]:
        # Runs for every parameter and step.
        @uncompiled
        def on_gradient(parameter: Tensor) -> None:
            if self.is_open:
                self._on_gradient(number)
                return
            self._open(parameter)
            # Under the number that it has now; torch also calls the hook of a parameter that was
            # frozen since forward, which has no number any more and gets no gradient.
            for current, watched in enumerate(self._parameters):
                if watched is parameter:
                    self._on_gradient(current)

        on_gradient.is_of_ferro_dist = True  # type: ignore[attr-defined]
        return on_gradient

    @uncompiled
    def _on_output_gradient(self, leaves: Sequence[RemovableHandle], _: Tensor) -> None:
        if self._is_stopped:
            self._refuse_abandoned()
            return
        if not self.is_open and _accumulates(self._found_accumulators(), self._parameters):
            self._open()
        if self.is_open and leaves and not _keeps_graph():
            self._passed_leaves += leaves

    def _refuse_abandoned(self) -> None:
        """Refuse a backward to parameters that nobody watches since they were abandoned."""
        parameters = [p for reference in self._abandoned if (p := reference()) is not None]
        orphans = [p for p in parameters if p.requires_grad and not _is_watched(p)]
        if _reaches_any(map(_accumulator, orphans)):
            raise RuntimeError(
                "DDP: the wrapper is gone, so these gradients would not be averaged. Keep what "
                "fd.DDP() returns until backward has ended."
            )

    def _found_accumulators(self) -> Iterator[Any]:
        """Yield each parameter's node that adds to ``grad``; nodes asked for are kept."""
        yield from self._accumulators.values()
        for number, parameter in enumerate(self._parameters):
            # One that was frozen since forward has none.
            if number not in self._accumulators and parameter.requires_grad:
                self._accumulators[number] = node = _accumulator(parameter)
                yield node

    def _open(self, first: Tensor = None) -> None:
        with self._opening:
            if self.is_open:
                return
            self._on_gradient = self._on_begin(first)
            self.is_open = True
            # The engine owns the callback: it calls it at the end, or drops it if backward raises.
            # A `__del__` would run after a call, too, and could swallow a KeyboardInterrupt.
            callback = functools.partial(self._close)
            self._end_of_task = weakref.ref(callback, self._on_dropped)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    @uncompiled
    def _close(self) -> None:
        self._forget_task()
        self._on_end()

    @uncompiled
    def _on_dropped(self, _: object) -> None:
        self._forget_task()
        self._on_failure()

    def _forget_task(self) -> None:
        self.is_open = False
        self._end_of_task = None
        # Of the forwards that it has passed: what is computed from their leaves elsewhere, perhaps
        # on a single rank, is no output. Other forwards may still have their own backward.
        for handle in self._passed_leaves:
            handle.remove()
        self._passed_leaves.clear()


def _accumulator(parameter: Tensor) -> Any:
    """Return the node that adds to ``grad``."""
    with outside_inference_mode():  # in which there are no nodes
        return torch.autograd.graph.get_gradient_edge(parameter).node


def _reaches_any(accumulators: Iterable[Any]) -> bool | None:
    """Whether the backward under way reaches any of these nodes; None if it adds to no ``grad``."""
    try:
        return any(map(torch._C._will_engine_execute_node, accumulators))
    except RuntimeError:  # it is `torch.autograd.grad`
        return None


def _accumulates(accumulators: Iterable[Any], parameters: Iterable[Tensor]) -> bool:
    """Whether the backward under way, in whose hook this is called, will add to ``grad``."""
    reaches_any = _reaches_any(accumulators)
    if reaches_any is not False:
        return bool(reaches_any)
    # None of them is in this rank's graph, or their gradients are not asked for. In the first case
    # the other ranks wait, in the second they know of nothing.
    ids = set(map(id, parameters))
    run = _run_of_backward(sys._getframe())
    if run is not None:
        return _asks_for_any(run, ids)
    # On a thread of the engine, for a GPU: its caller is on another one.
    runs = [_run_of_backward(frame) for frame in sys._current_frames().values()]
    found = [run for run in runs if run is not None]
    return bool(found) and all(_asks_for_any(run, ids) for run in found)


def _run_of_backward(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        frame = frame.f_back
    return frame


def _asks_for_any(run: FrameType, ids: Container[int]) -> bool:
    """Whether a backward adds to ``grad`` of all leaves that it reaches, or of any of these."""
    inputs = run.f_locals["args"][3]
    is_asked = not inputs or any(id(each) in ids for each in inputs)
    return is_asked and run.f_locals["kwargs"].get("accumulate_grad", False)


def _keeps_graph() -> bool:
    """Whether there may be another backward through the graph of that under way."""
    run = _run_of_backward(sys._getframe())
    return run is not None and bool(run.f_locals["args"][1])


def refuse_watched(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters of which a `BackwardWatcher` tells another DDP."""
    for name, parameter in parameters.items():
        if _is_watched(parameter):
            raise ValueError(
                f"DDP: parameter {name!r} is wrapped by another DDP already, and would be "
                "averaged twice. Call its into_inner() first."
            )


def _is_watched(parameter: Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks or {}
    return any(hasattr(hook, "is_of_ferro_dist") for hook in hooks.values())


def refuse_compiled() -> None:
    """Refuse a backward that was compiled, in a hook of it."""
    # A graph that was compiled from autograd's calls the hooks of nodes, but consists of none.
    if torch._C._current_autograd_node() is None:
        raise RuntimeError(
            "DDP: this backward runs under torch's compiled autograd, which does not tell when it "
            "has ended. Leave torch._dynamo.config.compiled_autograd False, or call backward() "
            "outside what enables it; the module itself may stay compiled."
        )


def refuse_differentiable() -> None:
    """Refuse a backward whose gradients can be differentiated again, in a hook of it."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "DDP: create_graph=True is for gradients that are differentiated again, but averages "
            "cannot be. Compute what enters the loss with torch.autograd.grad(..., "
            "create_graph=True), or call backward inside no_sync() and sync_gradients() last."
        )


def refuse_inner() -> None:
    """Refuse a backward inside of an autograd function's own, in a hook of it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _RUN_FUNCTION:
            raise RuntimeError(
                "DDP: with step_in_backward, the optimizer would step at the end of a backward "
                "that is part of another one, as in a re-entrant checkpoint. Let the outer one "
                "pass outputs of forward: call the module through the wrapper, and return outputs "
                "in lists, dicts or attributes. Or give the checkpoint use_reentrant=False."
            )
        frame = frame.f_back
