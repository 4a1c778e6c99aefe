"""An optimizer for torch whose state is divided among the ranks.

Each rank keeps the state of its own share of the parameters, steps these, and gets the
others from their owners:

1. reduce_scatter: each rank gets the average gradient of its share.
2. The wrapped optimizer steps the share.
3. all_gather: all ranks get all parameters.

Both together move what one allreduce of the gradients moves.

References
----------
S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020: stage 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferro_dist.arguments import check_root, in_order
from ferro_dist.collective import allreduce
from ferro_dist.integrations.torch.gradient import dtype_of_gradient
from ferro_dist.integrations.torch.sharded_optimizer.manifest import (
    lines_of,
    lines_of_saved,
    options_of,
)
from ferro_dist.integrations.torch.sharded_optimizer.shard import Shard
from ferro_dist.integrations.torch.sharded_optimizer.state import (
    cut_state,
    gather_states,
    join_states,
)
from ferro_dist.integrations.torch.shareable import check_shareable
from ferro_dist.integrations.torch.uncompiled import uncompiled
from ferro_dist.interop import dtype_code, numpy_dtype
from ferro_dist.parallel.buckets.averaging import REDUCE_OPS, check_averageable
from ferro_dist.parallel.group_checks import check_group
from ferro_dist.parallel.interruption import interrupt, telling
from ferro_dist.parallel.manifest import agree_on_manifest
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.shard_layout import Fragment

__all__ = ["ShardedOptimizer"]

Tensor = Any

_LOAD_THE_SAME = "Load the same state on every {member}."

# What these do to an element depends on that element alone. Matched by exact class: a subclass may
# look at more.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
_REFUSED = {
    torch.optim.LBFGS: "it looks at all parameters together",
    torch.optim.SparseAdam: "it takes sparse gradients, which cannot be divided",
}


class ShardedOptimizer(torch.optim.Optimizer):
    """Divide the state of an optimizer by the number of ranks.

    All ranks construct it together, with the same arguments. Every rank gets the parameters
    of rank 0.

    Parameters
    ----------
    params : iterable
        Parameters, or dicts of them with options: what `optimizer_class` takes.
    optimizer_class : type
        Any of torch's except LBFGS and SparseAdam, or another that treats each parameter by itself.
    backend : Backend
        The group; closing it is left to the caller. No wait for other ranks lasts longer than its
        `timeout`.
    average : {"mean", "sum", None}, default "mean"
        How the gradients of the ranks are combined. None if `DDP` has averaged them already: they
        are equal on all ranks, and only the parameters are communicated.
    divides_parameters : bool, optional
        Whether a parameter may be divided between ranks, so that all have equal shares. By
        default True for torch's optimizers that treat each element by itself; others (Adafactor,
        Muon, LAMB) are given whole parameters.
    **options
        For `optimizer_class`: ``lr=1e-3``.

    Attributes
    ----------
    param_groups : list of dict
        The user's own parameters, with the options of each group, which learning rate schedulers
        change.

    Raises
    ------
    TypeError, ValueError
        Bad arguments. Nothing was sent.
    CollectiveMismatch
        The ranks disagree on parameters, optimizer or options. The group stays usable.

    Notes
    -----
    Without DDP, it averages the gradients itself: train a plain module with it. With DDP, pass
    ``average=None``: averaging twice would cost time, and ``"sum"`` twice would be wrong.

    Every rank must call `step`, `clip_grad_norm_` and `consolidate_state_dict` as often as the
    others. A gradient that is None counts as zeros; if all ranks lack it, the parameter is not
    stepped.

    Options must stay equal on all ranks: a scheduler that looks at a loss, as ``ReduceLROnPlateau``
    does, is given the average over the ranks.

    Each share of the state exists only on its owner: if a rank is lost, go on from a checkpoint. An
    exception on a single rank, in a step or its closure, ends the group, as the others would wait
    for that rank.

    With ``torch.amp.GradScaler`` all ranks skip a step if the gradients of any rank overflowed.
    Each rank scales its own loss: scales may differ between ranks, and gradients are still right.
    Call ``scaler.unscale_(optimizer)`` before `clip_grad_norm_`.

    Examples
    --------
    >>> optimizer = fd.ShardedOptimizer(model.parameters(), torch.optim.AdamW, backend, lr=1e-3)
    >>> for inputs, targets in my_share_of_the_data:
    ...     optimizer.zero_grad()
    ...     loss_fn(model(inputs), targets).backward()
    ...     optimizer.clip_grad_norm_(1.0)
    ...     optimizer.step()
    >>> optimizer.consolidate_state_dict(root=0)
    >>> if backend.rank == 0:
    ...     torch.save(optimizer.state_dict(), path)
    """

    # Makes GradScaler call `step` on every rank, with attributes `grad_scale` and `found_inf` set,
    # instead of skipping it on those whose own gradients have overflowed.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type,
        backend: Backend,
        *,
        average: str | None = "mean",
        divides_parameters: bool | None = None,
        **options: Any,
    ) -> None:
        _check_class(optimizer_class)
        check_group("ShardedOptimizer", backend)
        self._op = _reduce_op(average)
        self._backend = backend
        self._divides_parameters = _divides(optimizer_class, divides_parameters)
        self._shards: list[Shard] = []
        self._inner: Any = None
        self._tag = 0
        # The gradients that were reduced before the step, as they were: None if none were.
        self._reduced: list[tuple[Tensor | None, int]] | None = None
        self._consolidated: dict[str, Any] | None = None
        super().__init__(in_order(params), {})
        self._check_parameters(self.param_groups)
        # Its own errors, for instance about options, come before anything is sent.
        stand_ins = _stand_ins(self.param_groups, self._divides_parameters)
        resolved = optimizer_class(stand_ins, **options)
        _pass_options(resolved.param_groups, self.param_groups)
        self.defaults = dict(resolved.defaults)
        # By the options as given: the defaults may name some that are not its arguments.
        self._new_inner = functools.partial(optimizer_class, **options)
        self._shard(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, such as those of a layer that was frozen so far. Called by all ranks.

        Parameters
        ----------
        param_group : dict
            ``"params"``, and options that differ from those of the constructor.

        Raises
        ------
        TypeError, ValueError
            Bad arguments. Nothing was sent.
        CollectiveMismatch
            The ranks add different parameters or options. None are added; the group stays usable.

        Notes
        -----
        If `optimizer_class` refuses the parameters, none are added either. If it does so on some
        ranks alone, the next step raises CollectiveMismatch on all.
        """
        super().add_param_group(param_group)
        if self._inner is None:
            return
        num_groups = len(self._inner.param_groups)
        try:
            self._check_parameters(self.param_groups[-1:])
            self._shard(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            del self._inner.param_groups[num_groups:]  # it may have raised after it took the group
            raise
        self._consolidated = None

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters. Called by all ranks.

        Parameters
        ----------
        closure : callable, optional
            Recomputes loss and gradients; called once.

        Returns
        -------
        What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad(), telling(self._tell_the_others):
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, including those that `clip_grad_norm_` has averaged."""
        super().zero_grad(set_to_none)
        self._drop_reduced()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    @uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the averaged gradients down to a global norm of at most `max_norm`.

        Called by all ranks, after backward and right before `step`: it averages the
        gradients, and the step takes what it has left of them. ``p.grad`` stays as it was;
        ``torch.nn.utils.clip_grad_norm_`` would clip it by the norm of this rank alone.

        Parameters
        ----------
        max_norm : float
        norm_type : float, default 2.0
            Of the p-norm; may be ``inf``.
        error_if_nonfinite : bool, default False
            Raise RuntimeError, on all ranks, if the norm is NaN or infinite.

        Returns
        -------
        torch.Tensor, 0-dimensional
            The norm over all parameters before clipping, the same on all ranks.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be at least 0, not {max_norm!r}")
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, not {norm_type!r}")
        # A step that was skipped, for instance because of its norm, has left the gradients of
        # another batch; perhaps not on all ranks, as some may have had no batch.
        survey = self._survey()
        if survey.changed or survey.reduced < self._backend.world_size:
            self._reduce_gradients()
        gradients = [own.grad for _, _, own in self._owned() if own.grad is not None]
        norm = self._global_norm(gradients, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"ShardedOptimizer: the norm of the gradients is {float(norm)}")
        # torch's constant, for the same step as after torch.nn.utils.clip_grad_norm_.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device, gradient.real.dtype))
        return norm

    def consolidate_state_dict(self, root: int | None = 0) -> None:
        """Collect the state, for `state_dict`. Called by all ranks.

        Parameters
        ----------
        root : int or None
            The rank that may then call `state_dict`; None for all.

        Raises
        ------
        InvalidRank
            The root is not a rank of the group. Nothing was sent.
        ValueError
            The state holds something other than tensors and plain values. Raised on all ranks; the
            group stays usable.
        """
        if root is not None:
            op, backend = "ShardedOptimizer", self._backend
            root = check_root(op, root, rank=backend.rank, world_size=backend.world_size)
        what = f"the state of {type(self._inner).__name__}"
        states = gather_states(
            self._own_states(), what, self._backend, root, self._device(), self._tag
        )
        self._consolidated = None
        if states is not None:
            joined = join_states(states, self._parameters())
            self._consolidated = {**super().state_dict(), "state": joined}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, as `optimizer_class` alone would return it.

        Raises
        ------
        RuntimeError
            It was not consolidated on this rank, or a step has been taken since.
        """
        if self._consolidated is None:
            raise RuntimeError(
                "ShardedOptimizer: the state is divided among the ranks. Call "
                "consolidate_state_dict(root) on all ranks first, after the last step."
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a whole state: each rank keeps its share of it.

        Called by all ranks, with the same state.

        Parameters
        ----------
        state_dict : dict
            Of a `ShardedOptimizer` over any number of ranks, or of `optimizer_class` alone.

        Raises
        ------
        ValueError
            The state is of another number of groups, or of parameters in one of them. Nothing is
            loaded; the group stays usable.
        CollectiveMismatch
            The ranks load different options or counts of steps, or state for different parameters.
            None is loaded; the group stays usable.
        """
        state = self._load_options(state_dict)
        inner = self._inner.state_dict()
        own = self._inner_numbers()
        inner["state"] = {
            own[id(elements)]: cut_state(state[id(p)], p, fragment)
            for p, fragment, elements in self._owned()
            if id(p) in state
        }
        self._inner.load_state_dict(inner)
        self._consolidated = None
        self._drop_reduced()

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ShardedOptimizer cannot be pickled or copied: it is a share of a group. Use "
            "consolidate_state_dict() and state_dict()."
        )

    # Parameters and their shards

    def _check_parameters(self, groups: list[dict[str, Any]]) -> None:
        """Check the parameters of the last groups."""
        for number, group in enumerate(groups, len(self.param_groups) - len(groups)):
            for i, p in enumerate(group["params"]):
                self._check_parameter(f"parameter {i} of group {number}", p)

    def _check_parameter(self, what: str, p: Tensor) -> None:
        op = "ShardedOptimizer"
        check_shareable(op, what, p)
        if self._op is not None:
            dtype = numpy_dtype(dtype_code(dtype_of_gradient(p)))
            check_averageable(what, dtype, " Leave what is not trained out.", op)

    def _shard(self, groups: list[dict[str, Any]]) -> None:
        """Divide the parameters of some groups, and give the wrapped optimizer its share."""
        tag = agree_on_manifest(
            lines_of(groups, self._new_inner.func, self._op, self._divides_parameters),
            self._backend,
            op="ShardedOptimizer",
        )
        shards = self._shards_of(groups, tag)
        owned: dict[int, list[Tensor]] = {}
        for p, _, elements in (each for shard in shards for each in shard.owned):
            owned.setdefault(id(p), []).append(elements)
        shares = [
            {
                **options_of(group),
                "params": [each for p in group["params"] for each in owned.get(id(p), [])],
            }
            for group in groups
        ]
        if self._inner is None:
            self._inner = self._new_inner(shares)
        else:
            self._inner.add_param_group(shares[0])
        # Last, as it may raise. If it does so on one rank alone, the tags of the ranks differ.
        self._shards += shards
        self._tag = tag

    def _shards_of(self, groups: list[dict[str, Any]], tag: int) -> list[Shard]:
        kinds: dict[tuple[Any, Any, Any], list[Tensor]] = {}
        for p in (p for group in groups for p in group["params"]):
            kinds.setdefault((p.dtype, dtype_of_gradient(p), p.device), []).append(p)
        with telling(self._tell_the_others):
            shards = [
                Shard(parameters, self._backend, self._divides_parameters, tag)
                for parameters in kinds.values()
            ]
            for shard in shards:
                shard.broadcast_parameters()
        return shards

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _owned(self) -> Iterator[tuple[Tensor, Fragment, Tensor]]:
        """Yield what this rank steps, as `Shard.owned`."""
        return itertools.chain.from_iterable(shard.owned for shard in self._shards)

    def _device(self) -> Any:
        return self._shards[0].parameters[0].device

    # A step

    def _step(self) -> None:
        survey = self._survey()
        if survey.overflowed:
            self._drop_reduced()
            return
        if survey.reduced:
            self._check_is_clipped_last(survey)
        with telling(self._tell_the_others):
            if not survey.reduced:
                self._unscale()
                self._reduce_gradients()
            self._step_shares()
        self._drop_reduced()

    def _survey(self) -> _Survey:
        """Count the ranks in each state: what one of them must do, or refuses, all do."""
        gradients = [p.grad for p in self._parameters()]
        is_reduced = self._reduced is not None
        own = _Survey(
            reduced=is_reduced,
            changed=is_reduced and not self._are_as_reduced(),
            overflowed=bool(getattr(self, "found_inf", False)),
            sparse=any(grad is not None and grad.layout is not torch.strided for grad in gradients),
        )
        flags = torch.tensor(own, dtype=torch.float32, device=self._device())
        counts = allreduce(flags, self._backend, tag=self._tag).tolist()
        survey = _Survey(*map(int, counts))
        if survey.sparse:
            raise TypeError(
                f"ShardedOptimizer: on {survey.sparse} ranks a gradient is sparse. Make it dense: "
                "Embedding(sparse=False)."
            )
        return survey

    def _check_is_clipped_last(self, survey: _Survey) -> None:
        if survey.changed or survey.reduced < self._backend.world_size:
            raise RuntimeError(
                "ShardedOptimizer: there was another backward, or another change of gradients, "
                "between clip_grad_norm_() and step(), on this rank or another. Clip last."
            )
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError(
                "ShardedOptimizer: gradients were clipped while scaled. Call "
                "scaler.unscale_(optimizer) before clip_grad_norm_()."
            )

    def _unscale(self) -> None:
        """Divide this rank's gradients by the factor that GradScaler has put on its loss."""
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return
        for p in self._parameters():
            if p.grad is not None:
                p.grad.div_(scale.to(p.grad.device))

    def _reduce_gradients(self) -> None:
        gradients = [p.grad for p in self._parameters()]
        for shard in self._shards:
            if self._op is None:
                shard.take_gradients()
            else:
                shard.reduce_gradients(self._op)
        self._reduced = [(grad, -1 if grad is None else grad._version) for grad in gradients]

    def _are_as_reduced(self) -> bool:
        gradients = [p.grad for p in self._parameters()]
        assert self._reduced is not None
        return len(gradients) == len(self._reduced) and all(
            grad is before and (grad is None or grad._version == version)
            for grad, (before, version) in zip(gradients, self._reduced, strict=True)
        )

    def _drop_reduced(self) -> None:
        self._reduced = None
        for shard in self._shards:
            shard.drop_gradients()

    def _step_shares(self) -> None:
        self._consolidated = None
        _pass_options(self.param_groups, self._inner.param_groups)
        for shard in self._shards:
            shard.look_again()
        self._inner.step()
        _pass_options(self._inner.param_groups, self.param_groups)
        for shard in self._shards:
            shard.share_parameters()

    def _global_norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        device = self._device()
        norms = [torch.linalg.vector_norm(g, norm_type).to(device).double() for g in gradients]
        own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
        if norm_type == float("inf"):
            return allreduce(own.max(), self._backend, ReduceOp.MAX, tag=self._tag)
        total = allreduce(own.pow(norm_type).sum(), self._backend, tag=self._tag)
        return total.pow(1.0 / norm_type)

    def _tell_the_others(self, error: BaseException) -> None:
        interrupt(self._backend, error)

    # The state

    def _own_states(self) -> dict[tuple[int, int, int], dict[str, Any]]:
        """Return this rank's states, by number of the parameter and range of elements."""
        numbers = self._parameter_numbers()
        return {
            (numbers[id(p)], fragment.start, fragment.stop): self._inner.state[elements]
            for p, fragment, elements in self._owned()
            if elements in self._inner.state
        }

    def _load_options(self, state_dict: Mapping[str, Any]) -> dict[int, Any]:
        """Load all but the state of parameters; return that, by their ids."""
        saved: dict[str, Any] = {}

        def put_aside(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            saved.update(given)
            op = "ShardedOptimizer.load_state_dict"
            agree_on_manifest(lines_of_saved(given), self._backend, op, remedy=_LOAD_THE_SAME)
            return {**given, "state": {}}

        # After the user's own hooks, which may rename what was saved.
        hook = self.register_load_state_dict_pre_hook(put_aside)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            hook.remove()
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        return {
            id(p): saved["state"][number]
            for p, number in zip(self._parameters(), numbers, strict=True)
            if number in saved["state"]
        }

    def _parameter_numbers(self) -> dict[int, int]:
        return {id(p): number for number, p in enumerate(self._parameters())}

    def _inner_numbers(self) -> dict[int, int]:
        elements = (e for group in self._inner.param_groups for e in group["params"])
        return {id(each): number for number, each in enumerate(elements)}


class _Survey(NamedTuple):
    """The state of a rank's gradients; summed, the number of ranks in each state."""

    reduced: int
    changed: int
    overflowed: int
    sparse: int


def _check_class(optimizer_class: object) -> None:
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"ShardedOptimizer takes a class of optimizers, such as torch.optim.AdamW, not "
            f"{optimizer_class!r}"
        )
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise TypeError(f"ShardedOptimizer cannot divide {optimizer_class.__name__}: {reason}")


def _reduce_op(average: str | None) -> ReduceOp | None:
    if average is None:
        return None
    if not isinstance(average, str) or average not in REDUCE_OPS:
        raise ValueError(
            f"ShardedOptimizer: average must be 'mean', 'sum' or None, not {average!r}"
        )
    return REDUCE_OPS[average]


def _divides(optimizer_class: type, divides_parameters: bool | None) -> bool:
    if divides_parameters is None:
        return optimizer_class in _ELEMENTWISE
    if divides_parameters not in (True, False):
        raise ValueError(
            "ShardedOptimizer: divides_parameters must be True, False or None, not "
            f"{divides_parameters!r}"
        )
    return bool(divides_parameters)


def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for given, taking in zip(source, target, strict=True):
        taking.update(options_of(given))


def _stand_ins(groups: list[dict[str, Any]], divides_parameters: bool) -> list[dict[str, Any]]:
    """Return groups with the same options and other parameters, to see what is made of them.

    All of a kind lie in the same memory. An optimizer may view them flat and write to them, as it
    could not if they were expanded.
    """

    def shape_of(p: Tensor) -> Any:
        # An optimizer that is given whole parameters may refuse some, as Muon does by their shapes:
        # later, their owner alone would find that out.
        return (1,) if divides_parameters else p.shape

    counts: dict[tuple[Any, Any], int] = {}
    for p in (p for group in groups for p in group["params"]):
        kind = p.dtype, p.device
        counts[kind] = max(math.prod(shape_of(p)), counts.get(kind, 0))
    memory = {kind: torch.zeros(n, dtype=kind[0], device=kind[1]) for kind, n in counts.items()}

    def stand_in(p: Tensor) -> Tensor:
        shape = shape_of(p)
        return memory[p.dtype, p.device][: math.prod(shape)].view(shape)

    return [{**options_of(each), "params": list(map(stand_in, each["params"]))} for each in groups]
