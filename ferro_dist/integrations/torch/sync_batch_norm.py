"""BatchNorm over the batches of all ranks, for torch, on CPUs and GPUs.

    y = (x - mean) / sqrt(var + eps) * weight + bias

where mean and variance are taken over all ranks' parts of the batch.

1. Forward: each rank computes count, mean and variance of its own values; one all_gather;
   all ranks combine them by Chan's formula, weighted by the counts. Sums of squares, one
   allreduce, would cancel where the mean is large.
2. Backward: the gradients of mean and variance are summed over the ranks, in one allreduce.

Autograd does the rest, for the gradient, too: it may be differentiated again.

References
----------
S. Ioffe, C. Szegedy, "Batch Normalization", ICML 2015.
T. Chan, G. Golub, R. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", 1979.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ferro_dist.collective import all_gather, allreduce
from ferro_dist.integrations.torch.random import while_others_draw
from ferro_dist.parallel.group_checks import check_group
from ferro_dist.parallel.interruption import KnownToAll
from ferro_dist.parallel.manifest import agree_on_manifest

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "groups_in_use"]

Tensor = Any

# The dtype in which statistics travel: exact for any count, and they are small anyway.
_WIRE_DTYPE = torch.float64

# What a BatchNorm does and has.
_FORWARDS = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)
_OWN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def convert_sync_batchnorm(module: Any, backend: Backend) -> Any:
    """Let every BatchNorm in a torch module normalize over the batches of all ranks.

    Called by all ranks, before the module is wrapped in `DDP`.

    Parameters
    ----------
    module : torch.nn.Module
        Changed in place: each BatchNorm, including torch's SyncBatchNorm, is replaced by a
        `SyncBatchNorm` with the same parameters, buffers and hooks. Modules that were converted
        before get the new group.
    backend : Backend
        The group of the ranks; closing it is left to the caller. The modules get a group of their
        own, of the same ranks, which ends with the last module, so that their collectives and those
        of `DDP` need no common order.

    Returns
    -------
    torch.nn.Module
        `module` itself, or its replacement if it is a BatchNorm.

    Raises
    ------
    TypeError, ValueError
        `module` is no torch module; or a BatchNorm in it is still lazy, has a forward of its own,
        or was pruned, parametrized or otherwise extended. Nothing was sent.
    CollectiveMismatch
        The ranks have different BatchNorms. The group stays usable.

    Notes
    -----
    The state_dict is that of BatchNorm. In evaluation mode nothing is communicated. In training
    mode every rank must call the module and its backward as often as the others; a rank that has
    run out of data may give an empty batch. An exception on one rank, for instance in an earlier
    layer, ends the modules' group if they are wrapped in `DDP` or in a stage of a `Pipeline`;
    otherwise the other ranks find out when the call times out. Convert the module again for the
    group that `shrink` makes.

    The gradients of weight and bias are those of this rank's loss, as with any other layer:
    `DDP` averages them.

    Examples
    --------
    >>> model = fd.DDP(fd.convert_sync_batchnorm(model, backend), backend)
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"convert_sync_batchnorm takes a torch module, not {type(module).__name__}")
    check_group("convert_sync_batchnorm", backend)
    found = dict(_batch_norms(module))
    for name, norm in found.items():
        _check_is_initialized(name, norm)
        _check_is_plain(name, norm)
    lines = [f"{type(n).__name__} {name!r} of {n.num_features}" for name, n in found.items()]
    agree_on_manifest(lines, backend, op="convert_sync_batchnorm")
    if not found:
        return module
    group = _Group(backend.split(range(backend.world_size)) if backend.world_size > 1 else None)
    # Two tags each: ranks in different layers, or in different directions, raise.
    tags = itertools.count(step=2)
    replacements = {id(norm): _replacement(norm, group, next(tags)) for norm in found.values()}
    return _replace(module, replacements)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of any number of dimensions, over all ranks; made by `convert_sync_batchnorm`.

    Parameters
    ----------
    num_features : int
    eps, momentum, affine, track_running_stats
        As those of ``torch.nn.BatchNorm2d``.

    Raises
    ------
    RuntimeError
        In training, if it has no group, for instance after unpickling. Convert it again.
    ValueError
        In training, if the ranks together have fewer than two values for each channel. Raised on
        all of them; the group stays usable.
    """

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self._group: _Group | None = None
        self._tag = 0

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm takes a tensor of shape (batch, {self.num_features}, ...), "
                f"not {tuple(x.shape)}"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, of shape (batch, num_features, ...)."""
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        if self._group is None:
            raise RuntimeError(
                "SyncBatchNorm has no group: call convert_sync_batchnorm(model, backend) on "
                "every rank."
            )
        if self._group.backend is None:  # a world of one
            return super().forward(x)
        mean, var, count = _Statistics.apply(x, self._group.backend, self._tag)
        if count.device.type == "cpu" and count < 2:
            # Not checked on a GPU, where every layer would wait for the stream.
            raise KnownToAll(
                f"SyncBatchNorm: the batches of all ranks have {int(count)} values for each "
                "channel; a variance needs two."
            )
        self._track(mean.detach(), var.detach(), count)
        return self._normalize(x, mean, var)

    def _normalize(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        dtype = _compute_dtype(x)
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        # Centered first: x * scale - mean * scale would cancel where the mean is large.
        y = (x - _along_channels(mean, x, dtype)) * _along_channels(scale, x, dtype)
        if self.bias is not None:
            y = y + _along_channels(self.bias, x, dtype)
        return y.to(x.dtype)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Update the running statistics."""
        if self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # the average of all batches
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def groups_in_use(module: Any) -> list[Backend]:
    """Return the groups in which the `SyncBatchNorm` layers of a module wait in training."""
    layers = [each for each in module.modules() if isinstance(each, SyncBatchNorm)]
    groups = {id(each._group): each._group for each in layers if each._group and each.training}
    return [group.backend for group in groups.values() if group.backend is not None]


class _Group:
    """The ranks that normalize together. A copy of a module is in the same group."""

    def __init__(self, backend: Backend | None) -> None:
        self.backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_group, ()  # another process is no rank of it


def _no_group() -> None:
    """Take the place of a group that was pickled."""


class _Statistics(torch.autograd.Function):
    """Mean, biased variance and count of each channel over all ranks, in `_WIRE_DTYPE`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: Backend, tag: int) -> tuple[Tensor, Tensor, Tensor]:
        own = _own_statistics(x.detach())
        with while_others_draw():
            rows = all_gather(own, backend, tag=tag).view(backend.world_size, -1)
        mean, var, count = _combine(rows)
        ctx.save_for_backward(x, mean, count)
        ctx.mark_non_differentiable(count)
        ctx.backend, ctx.tag = backend, tag
        return mean, var, count

    @staticmethod
    def backward(
        ctx: Any, mean_grad: Tensor, var_grad: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None]:
        x, mean, count = ctx.saved_tensors
        own = torch.cat([mean_grad, var_grad])
        total = _Sum.apply(own, ctx.backend, ctx.tag + 1) / count
        dtype = _compute_dtype(x)
        mean_part, var_part = (_along_channels(part, x, dtype) for part in total.chunk(2))
        x_grad = mean_part + 2 * var_part * (x - _along_channels(mean, x, dtype))
        return x_grad.to(x.dtype), None, None


class _Sum(torch.autograd.Function):
    """Sum over all ranks; what one rank adds reaches the loss of every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: Backend, tag: int) -> Tensor:
        ctx.backend, ctx.tag = backend, tag
        return allreduce(x.detach(), backend, tag=tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad.contiguous(), ctx.backend, ctx.tag), None, None


def _own_statistics(x: Tensor) -> Tensor:
    """Mean and variance of each channel of this rank's batch, and its count, in one row."""
    num_channels = x.shape[1]
    row = x.new_zeros(2 * num_channels + 1, dtype=_WIRE_DTYPE)
    if x.numel():
        dims = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = torch.var_mean(x.to(_compute_dtype(x)), dims, correction=0)
        row[:num_channels] = mean
        row[num_channels:-1] = var
        row[-1] = x.numel() // num_channels
    return row


def _combine(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and count of everything that the rows describe."""
    counts = rows[:, -1:]
    means, variances = rows[:, :-1].chunk(2, dim=1)
    count = counts.sum()
    weights = counts / count.clamp(min=1)
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return mean, var, count


def _compute_dtype(x: Tensor) -> Any:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _along_channels(values: Tensor, x: Tensor, dtype: Any) -> Tensor:
    return values.to(dtype).view(-1, *[1] * (x.dim() - 2))


# Conversion


def _batch_norms(module: Any) -> Iterator[tuple[str, Any]]:
    for name, each in module.named_modules():
        # InstanceNorm has the same base class, but no batch to share.
        if isinstance(each, _BatchNorm) and not _is_instance_norm(each):
            yield name, each


def _is_instance_norm(module: Any) -> bool:
    return isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)


def _check_is_initialized(name: str, norm: Any) -> None:
    tensors = (norm.weight, norm.running_mean)
    if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
        raise ValueError(
            f"convert_sync_batchnorm: {name!r} is lazy and has no parameters yet. Run the module "
            "once before."
        )


def _check_is_plain(name: str, norm: Any) -> None:
    """Refuse what does something that its replacement would not do."""
    if isinstance(norm, SyncBatchNorm):
        return  # it stays
    if "forward" in vars(norm) or type(norm).forward not in _FORWARDS:
        raise ValueError(
            f"convert_sync_batchnorm: the {type(norm).__name__} {name!r} has a forward of its "
            "own, which a SyncBatchNorm in its place would not run. Let it hold a BatchNorm of "
            "torch instead of being one, or replace it before."
        )
    extra = [key for key in (*norm._parameters, *norm._buffers, *norm._modules) if key not in _OWN]
    if extra:
        raise ValueError(
            f"convert_sync_batchnorm: {name!r} has {', '.join(map(repr, extra))}, which a "
            "SyncBatchNorm in its place would lack. Prune, parametrize and extend it afterwards."
        )


def _replacement(norm: Any, group: _Group, tag: int) -> SyncBatchNorm:
    if isinstance(norm, SyncBatchNorm):
        sync = norm
    else:
        sync = SyncBatchNorm(
            norm.num_features,
            eps=norm.eps,
            momentum=norm.momentum,
            affine=False,
            track_running_stats=norm.track_running_stats,
        )
        # The same objects: an optimizer may have the parameters already.
        sync.affine = norm.affine
        sync.weight, sync.bias = norm.weight, norm.bias
        sync.running_mean, sync.running_var = norm.running_mean, norm.running_var
        sync.num_batches_tracked = norm.num_batches_tracked
        sync.train(norm.training)
        # The same again: the handles that remove hooks know their tables.
        sync.__dict__.update((key, value) for key, value in vars(norm).items() if "hook" in key)
    sync._group, sync._tag = group, tag
    return sync


def _replace(module: Any, replacements: dict[int, SyncBatchNorm]) -> Any:
    """Put replacements in all places: a module may be in several."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in replacements:
                parent._modules[name] = replacements[id(child)]
    return replacements.get(id(module), module)
