"""DDP of torch modules: itself a module, which averages gradients in every backward.

It puts together parts of which each knows one thing: `wrapper` how to stand in another module's
place, `module` what must be equal on all ranks, `backward` when a backward begins and ends,
`gradients` and `sparse` where gradients are, with `accumulation` what they add up to and
`kept_views` which of them the user keeps, and `writes` whether replicas have drifted apart.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from ferro_dist.integrations.torch.ddp.backward import (
    BackwardWatcher,
    refuse_compiled,
    refuse_differentiable,
    refuse_inner,
    refuse_watched,
)
from ferro_dist.integrations.torch.ddp.gradients import (
    GivenGradients,
    NoTorchGradients,
    TorchGradients,
    gpu_view,
)
from ferro_dist.integrations.torch.ddp.module import (
    BufferShare,
    ModuleParameters,
    broadcast_tensor,
    fingerprints,
    show_changes,
    specs_of,
)
from ferro_dist.integrations.torch.ddp.sparse import SparseGradients, lines_of, without_rows
from ferro_dist.integrations.torch.ddp.wrapper import ModuleWrapper
from ferro_dist.integrations.torch.ddp.writes import ParameterWrites
from ferro_dist.integrations.torch.gradient import dtype_of_gradient
from ferro_dist.integrations.torch.inference_mode import outside_inference_mode
from ferro_dist.integrations.torch.memory import as_tensor
from ferro_dist.integrations.torch.optimizer_state import broadcast_optimizer
from ferro_dist.integrations.torch.sharded_optimizer.sharded_optimizer import ShardedOptimizer
from ferro_dist.integrations.torch.sync_batch_norm import groups_in_use
from ferro_dist.integrations.torch.uncompiled import uncompiled
from ferro_dist.parallel.buckets.gpu_memory import GpuMemory
from ferro_dist.parallel.ddp.ddp import compare
from ferro_dist.parallel.ddp.options import Options
from ferro_dist.parallel.ddp.participation import REFUSED, Participation
from ferro_dist.parallel.ddp.reducer import Call, NoGradients, Reducer, tag_of
from ferro_dist.parallel.ddp.reducing_ddp import ReducingDDP
from ferro_dist.parallel.exchange import all_gather_rows
from ferro_dist.parallel.interruption import telling
from ferro_dist.parallel.manifest import agree_on_manifest

__all__ = ["TorchDDP"]

DRIFTED = (
    "They were equal once: some ranks have taken or skipped a step alone, or forward writes what "
    "depends on a rank's own batch, as F.embedding(max_norm=...) does. Whatever decides on a step, "
    "such as the loss that LBFGS is given, must be the same on all ranks. What is to differ for a "
    "while, such as noise of a rank's own, is written through parameter.data. "
)


class _State:
    """What changes in a wrapper. Not attributes of its own: setting one may set the module's.

    Attributes
    ----------
    is_checked : bool
        The forward to which the next backward belongs has looked at the parameters.
    is_local : bool
        The backward under way, or the last one, is inside `no_sync`.
    has_backward_averaged : bool
        The last averages are those of a backward.
    given : GivenGradients or None
        What `sync_gradients` is averaging, if not the gradients of the parameters.
    optimizer : torch.optim.Optimizer or None
        That of `step_in_backward`.
    num_copies : int
        How many copies of the wrapper have been made.
    """

    __slots__ = (
        "given",
        "has_backward_averaged",
        "is_checked",
        "is_local",
        "num_copies",
        "optimizer",
    )

    def __init__(self) -> None:
        self.is_checked = self.is_local = self.has_backward_averaged = False
        self.given: GivenGradients | None = None
        self.optimizer: Any = None
        self.num_copies = 0


class TorchDDP(ReducingDDP[Any], ModuleWrapper):
    """DDP of a ``torch.nn.Module``.

    Every backward that reaches parameters, and is not inside `no_sync`, ends with averaged
    gradients, whether it came through this wrapper or through the module.

    ``state_dict`` and the names of parameters and buffers are those of the module;
    ``load_state_dict`` also takes what torch's DDP has saved.

    Gradients of an ``Embedding`` that was made with ``sparse=True`` stay sparse, unless some rank
    has a dense one for the same weight. Other sparse gradients become dense.
    """

    def __init__(self, module: Any, backend: Any, **options: Any) -> None:
        ModuleWrapper.__init__(self)
        try:
            ReducingDDP.__init__(self, module, backend, **options)
        except BaseException:
            # Who handles this may wrap the module again, while the error keeps this wrapper alive.
            if "_stop_watching" in self.__dict__:
                self._stop_watching()
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and watch for a backward of what it returns."""
        module = self.module
        # Inside torch.compile the wrapper is the module; hooks of its parameters do the rest.
        if torch.compiler.is_compiling():
            return module(*args, **kwargs)
        with self._telling_in_forward():
            if not torch.is_grad_enabled():
                return module(*args, **kwargs)
            if not self._watcher.is_open:  # else this is a checkpoint that recomputes
                self._check_parameters()
                # The user's own hooks must see this rank's gradients, and may change them.
                self._watcher.come_last()
                self._ddp_state.is_checked = True
            with self._writes.of_forward():
                outputs = module(*args, **kwargs)
        self._watcher.watch_outputs(outputs)
        return outputs

    def _telling_in_forward(self) -> contextlib.AbstractContextManager[None]:
        # Inside a backward, an exception may be how a checkpoint ends its recomputation.
        if torch._C._current_graph_task_id() >= 0:
            return contextlib.nullcontext()
        is_averaged = torch.is_grad_enabled() and self.training and not self._no_sync_depth
        return telling(self._tell_the_others if is_averaged else self._tell_layers)

    @contextlib.contextmanager
    def join(self, *optimizers: Any) -> Iterator[None]:
        if groups_in_use(self.module):
            raise ValueError(
                "DDP.join: a SyncBatchNorm in training waits for all ranks in every forward, so "
                "none can leave before the others. Let a rank without data give empty batches, or "
                "put these layers into evaluation mode."
            )
        self._check_parameters()  # a rank without a batch has no forward in which to notice
        self._gradients.note_averages()
        self._sparse.note_averages()
        with super().join(*optimizers):
            yield

    def step_in_backward(self, optimizer: Any) -> None:
        """Let an optimizer step at the end of every backward that averages gradients.

        Called by all ranks, with optimizers of the same parameters. From then on the loop consists
        of forward and backward: gradients are None after each. Inside `no_sync` they add up, and no
        step is taken; `sync_gradients` steps, too.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer or None
            An optimizer of parameters of the module. Its options may be changed between steps, for
            instance by a scheduler. None leaves the steps to the caller again.

        Raises
        ------
        TypeError, ValueError
            It is no optimizer, needs a closure, or has parameters of another module. Nothing was
            sent.
        CollectiveMismatch
            The optimizers of the ranks differ. The group stays usable.

        Notes
        -----
        The step is taken once all buckets have been reduced, not bucket by bucket: backward may
        still read a parameter whose gradient is there, and if a rank is lost meanwhile, parameters
        and optimizer are as before the step on all others.

        Anything to be done between backward and step, such as clipping, goes into a hook:
        ``optimizer.register_step_pre_hook``.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("DDP.step_in_backward: LBFGS recomputes the loss in its step")
        is_none = optimizer is None
        lines = ["no optimizer"] if is_none else self._lines_of("step_in_backward", optimizer)
        agree_on_manifest(lines, self._backend, op="DDP.step_in_backward")
        self._ddp_state.optimizer = optimizer

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchDDP:
        """Wrap a copy of the module, for the same group.

        Not a collective call: a copy that is to be trained must be made on all ranks.
        """
        module = self.module
        self._ddp_state.num_copies += 1
        twin = self._copy_without_module(memo)
        twin._wrap(copy.deepcopy(module, memo), self._options)
        # Far from all other tags, also from those of copies of copies.
        lineage = f"{self._first_tag} {self._ddp_state.num_copies}"
        twin._start(self._options, zlib.crc32(lineage.encode()))
        twin.training = self.training
        return twin

    # What `DDP` leaves to its kinds

    _held = ModuleWrapper._held

    def _wrap(self, module: Any, options: Options) -> list[str]:
        parameters = ModuleParameters(module, options.backend)
        if not parameters.named:
            raise ValueError(
                f"DDP: {type(module).__name__} has no parameters: there is nothing to be averaged"
            )
        refuse_watched(parameters.named)
        options.check_parameters(specs_of(parameters.dense))
        buffers = BufferShare(module, options.backend) if options.sync_buffers else None
        self._hold(module)
        self.__dict__.update(
            _parameters_of_module=parameters, _buffer_share=buffers, _ddp_state=_State()
        )
        return [*parameters.lines(), *(buffers.lines() if buffers else [])]

    def _prepare(self, options: Options, first_tag: int) -> None:
        gradients = TorchGradients()
        has_gpu = options.backend.device is not None
        with outside_inference_mode():  # buckets are written to in backward
            gpu_memory = GpuMemory(options.backend, torch.empty(0), gpu_view) if has_gpu else None
            reducer = Reducer(
                specs_of(self._parameters_of_module.dense),
                options,
                as_tensor,
                gpu_memory=gpu_memory,
                follows_order=True,
                first_tag=first_tag,
            )
        gradients.is_ready = reducer.is_ready
        # Hooks must not keep the wrapper alive. Those of parameters end with it; those of outputs
        # then tell that nothing is averaged any more.
        this = weakref.ref(self)
        watcher = BackwardWatcher(
            on_begin=lambda first: _alive(this)._begin(first),
            on_end=lambda: _alive(this)._end(),
            on_failure=lambda: _alive(this)._fail(),
        )
        self.__dict__.update(
            _gradients=gradients,
            _sparse=SparseGradients(options.averaging, options.backend, first_tag),
            _watcher=watcher,
            _stop_watching=weakref.finalize(
                self, watcher.abandon if options.backend.world_size > 1 else watcher.stop
            ),
            _first_tag=first_tag,
            _writes=ParameterWrites(self._parameters_of_module.named.values(), options.backend),
        )
        self._stop_watching.atexit = False
        self._reducer = reducer
        self._watch()

    def _release(self) -> None:
        self._stop_watching.detach()
        self._watcher.stop()
        self._let_go()
        self._reducer.lay_out(())
        self._gradients.forget()
        self._sparse.forget()

    @uncompiled
    def _average(self, grads: Any, weight: float | None) -> Any:
        if self._watcher.is_open:
            raise RuntimeError(
                "DDP.sync_gradients: a backward is under way. Outside of no_sync() it averages by "
                "itself; inside, call this once it has ended."
            )
        self._check_parameters()
        trained = self._parameters_of_module.trained
        given = None if grads is None else self._given_gradients(grads)
        if not self._no_sync_depth:
            if given is None:
                self._average_own(weight)
            else:
                self._average_given(given, weight)
        if given is not None:
            return grads
        return {name: parameter.grad for name, parameter in trained.items()}

    def _average_own(self, weight: float | None) -> None:
        if weight:
            self._refuse_averaged()
        with outside_inference_mode():  # averages are added to in backward
            with telling(self._tell_the_others):
                self._check_accumulation()
                self._reducer.begin(
                    self._gradients, weight=weight, wants_comparison=self._wants_comparison()
                )
                self._begin_accumulation()
            self._finish_own_round()
        self._ddp_state.has_backward_averaged = False

    def _average_given(self, given: GivenGradients, weight: float | None) -> None:
        with outside_inference_mode():  # what is moved, and buckets, are written to in backward
            self._gradients.make_way_for(given, self._reducer.memory)
            with telling(self._tell_the_others):
                self._reducer.begin(given, weight=weight, wants_comparison=self._wants_comparison())
        self._ddp_state.given = given
        try:
            self._finish_round()
        finally:
            self._ddp_state.given = None

    def _given_gradients(self, grads: Any) -> GivenGradients:
        parameters = self._parameters_of_module
        positions = {name: position for position, name in enumerate(parameters.trained)}
        order = [positions[name] for name in (*parameters.dense, *parameters.sparse)]
        return GivenGradients(grads, parameters.trained, order)

    def _broadcast(self, root: int) -> None:
        for _, tensor in self._tensors():
            broadcast_tensor(tensor, self._backend, root)
        show_changes(self._parameters_of_module.named.values())
        self._writes.start_anew()

    def _fingerprints(self) -> Iterable[tuple[str, bytes]]:
        return fingerprints(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        yield from self._parameters_of_module.labelled()
        if self._buffer_share is not None:
            yield from self._buffer_share.labelled()

    # What is trained

    def _watch(self) -> None:
        dense, sparse = self._parameters_of_module.dense, self._parameters_of_module.sparse
        self._gradients.adopt(dense)
        self._sparse.follow(specs_of(sparse), sparse)
        self._watcher.watch_parameters([*dense.values(), *sparse.values()])

    def _check_parameters(self) -> None:
        """Follow what was frozen, unfrozen, converted or resized since the last time."""
        parameters = self._parameters_of_module
        if not parameters.have_changed():
            return
        specs = specs_of(parameters.dense)
        self._options.check_parameters(specs)
        if not self._backend.moves_host_arrays:
            # NCCL alone does not compare the ranks' calls: they must agree before they make them.
            lines = [f"trained parameter {number} {spec}" for number, spec in enumerate(specs)]
            lines += lines_of(specs_of(parameters.sparse))
            agree_on_manifest(lines, self._backend, op="DDP")
        # One that was frozen when both were made. If it is frozen again, all goes on as before.
        own = self._watcher.watched()
        refuse_watched({n: p for n, p in parameters.trained.items() if id(p) not in own})
        self._gradients.let_go()
        with outside_inference_mode():  # buckets are written to in backward
            self._reducer.lay_out(specs)
        self._watch()
        parameters.accept_changes()

    # A backward, as the watcher reports it

    def _begin(self, first: Any) -> Callable[[int], object]:
        """Prepare for a backward; return the function to which its gradients are reported.

        Parameters
        ----------
        first : torch.nn.Parameter or None
            The one that has its gradient already.
        """
        state = self._ddp_state
        state.is_local = self._no_sync_depth > 0
        tell = self._tell_layers if state.is_local else self._tell_the_others
        with outside_inference_mode(), telling(tell):  # sums and averages outlast it
            refuse_compiled()
            # A backward that has passed no output may be of a forward past the wrapper, since then.
            if first is not None or not state.is_checked:
                self._check_parameters()
            state.is_checked = False
            if first is not None and not self._reducer.is_idempotent:
                self._refuse_added(first)
            self._check_accumulation()
            if state.is_local:
                self._writes.begin_local()
            else:
                refuse_differentiable()
                if first is not None and state.optimizer is not None:
                    refuse_inner()
                self._reducer.begin(
                    self._gradients,
                    is_held=self._watcher.is_followed(),
                    wants_comparison=self._wants_comparison(),
                )
            self._begin_accumulation()
            return self._note()

    def _note(self) -> Callable[[int], object]:
        """Return the function to which gradients are reported by number; dense ones come first."""
        is_local = self._ddp_state.is_local
        of_dense = self._gradients.note_local if is_local else self._reducer.mark_ready
        if not self._sparse.parameters:
            return cast("Callable[[int], object]", of_dense)
        num_dense, sparse = len(self._gradients.parameters), self._sparse

        def note(number: int) -> None:
            if number < num_dense:
                of_dense(number)
            else:
                sparse.note_local(number - num_dense)

        return note

    def _wants_comparison(self) -> bool:
        # Ranks that have run out of data take no steps.
        return not self._reducer.ranks_may_leave and self._writes.are_unexpected()

    def _check_accumulation(self) -> None:
        # Raises while all gradients are as they were, and before the round needs the group, which
        # another rank that raises here may have ended.
        if not self._reducer.is_idempotent:
            self._gradients.check()
            self._sparse.check()

    def _begin_accumulation(self) -> None:
        is_idempotent = self._reducer.is_idempotent
        self._gradients.begin(is_idempotent)
        self._sparse.begin(is_idempotent)

    def _refuse_added(self, first: Any) -> None:
        if self._gradients.was_added_to(first) or self._sparse.was_added_to(first):
            raise RuntimeError(
                "DDP: this backward has passed no known output of forward, and has added to an "
                "average that had to be put aside first. Set gradients to None before it. Or let "
                "it pass outputs: call the module through the wrapper, not compiled together with "
                "it; return outputs in lists, dicts or attributes; add a penalty on parameters or "
                "gradients to the loss of the outputs, in one backward."
            )

    def _end(self) -> None:
        with outside_inference_mode():
            if self._ddp_state.is_local:
                self._end_local()
                return
            self._finish_own_round()
            self._ddp_state.has_backward_averaged = True

    def _fail(self) -> None:
        # The others would wait in vain, for buckets or for what a layer sends.
        error = RuntimeError("backward raised")
        with outside_inference_mode():
            if self._ddp_state.is_local:
                self._end_local()
                self._tell_layers(error)
                return
            self._reducer.abandon()
            self._sparse.end_local()
        self._tell_the_others(error)

    def _end_local(self) -> None:
        self._gradients.end_local()
        self._sparse.end_local()

    # A round

    def _finish_own_round(self) -> None:
        """Finish a round to which this rank contributes the gradients of its parameters."""
        try:
            self._finish_round()
        except BaseException:
            self._sparse.end_local()  # brings back those put aside; dense ones are back already
            raise

    def _refuse_averaged(self) -> None:
        if not self._ddp_state.has_backward_averaged:
            return  # the user may have written new ones where the last averages were
        are_averaged = [*self._gradients.are_averaged(), *self._sparse.are_averaged()]
        if are_averaged and all(are_averaged):
            # On all ranks: others may have gradients to be weighted, and wait for this one.
            self._reducer.begin(NoGradients(), weight=REFUSED)
            self._finish_round()

    def _no_gradients(self) -> NoGradients:
        self._check_parameters()  # they may have been changed since this rank's last forward
        return NoTorchGradients(self._gradients)

    def _after_round(self, root: int, participation: Participation | None) -> None:
        is_present = participation is None or self._backend.rank in participation.present
        if self._sparse.is_used:
            op = self._options.averaging.reduce_op
            factor = None if participation is None else participation.factor(op)
            self._average_sparse(factor, is_present)
        if not self._reducer.ranks_may_leave:
            self._writes.end_round()
        if self._reducer.must_compare and not self._writes.are_alike():
            own = fingerprints(self._parameters_of_module.labelled())
            compare(own, self._backend, "DDP", DRIFTED)
            self._writes.accept()
        if self._ddp_state.optimizer is not None and is_present and self._ddp_state.given is None:
            self._ddp_state.optimizer.step()
            self._ddp_state.optimizer.zero_grad()
        if self._buffer_share is not None:
            self._buffer_share.broadcast(root, tag_of(self._first_tag, Call.BUFFERS))

    def _average_sparse(self, factor: float | None, is_present: bool) -> None:
        sparse, given = self._sparse, self._ddp_state.given
        if given is None:
            averages = sparse.average(sparse.own() if is_present else None, factor)
            if is_present:
                sparse.put(averages)
            return
        first = len(self._gradients.parameters)  # their numbers follow those of dense ones
        numbers = range(first, first + len(sparse.parameters))
        averages = sparse.average([given.get(number) for number in numbers], factor)
        for number, average in zip(numbers, averages, strict=True):
            if average is not None:
                given.replace(number, average)

    def _tell_the_others(self, error: BaseException) -> None:
        self._tell_layers(error)
        super()._tell_the_others(error)

    def _tell_layers(self, error: BaseException) -> None:
        """End the groups in which layers of other ranks may wait."""
        for group in groups_in_use(self.module):
            group.interrupt(error)

    # Optimizers

    def _lines_of_optimizers(self, optimizers: Sequence[Any]) -> list[str]:
        for optimizer in (*optimizers, self._ddp_state.optimizer):
            if isinstance(optimizer, ShardedOptimizer):
                raise ValueError(
                    "DDP.join: the steps of a ShardedOptimizer are taken by all ranks together; "
                    "none can leave before the others"
                )
        return [line for optimizer in optimizers for line in self._lines_of("join", optimizer)]

    def _lines_of(self, method: str, optimizer: Any) -> list[str]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"DDP.{method} takes an optimizer, not {type(optimizer).__name__}")
        names = {id(p): name for name, p in self._parameters_of_module.named.items()}
        lines = [type(optimizer).__qualname__]
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise ValueError(
                        f"DDP.{method}: a parameter of shape {tuple(p.shape)} in group "
                        f"{number} of the optimizer is none of the module's"
                    )
                lines.append(f"{names[id(p)]!r} in group {number}")
        return lines

    def _match_gradients(self, root: int) -> None:
        # One that is zeroed in place still moves its parameter, if the optimizer has momentum or
        # weight decay, and would do so on this rank alone.
        parameters = list(self._parameters_of_module.named.values())
        own = np.array([p.grad is not None for p in parameters], np.uint8)
        of_root = all_gather_rows(own, self._backend)[root].tolist()
        sparse = set(map(id, self._parameters_of_module.sparse.values()))
        with outside_inference_mode():  # they are added to in backward
            for p, is_there in zip(parameters, of_root, strict=True):
                if not is_there:
                    p.grad = None
                elif p.grad is None and id(p) in sparse:
                    p.grad = without_rows(p)
                elif p.grad is None:
                    p.grad = torch.zeros_like(p, dtype=dtype_of_gradient(p), requires_grad=False)

    def _broadcast_optimizers(self, optimizers: Sequence[Any], root: int) -> None:
        stepped = [] if self._ddp_state.optimizer is None else [self._ddp_state.optimizer]
        device = next(iter(self._parameters_of_module.named.values())).device
        with outside_inference_mode(), telling(self._tell_the_others):  # steps write to the state
            for optimizer in {id(each): each for each in (*optimizers, *stepped)}.values():
                broadcast_optimizer("DDP.join", optimizer, self._backend, root, device)


def _alive(reference: weakref.ref[TorchDDP]) -> TorchDDP:
    ddp = reference()
    assert ddp is not None, "hooks end with the wrapper"
    return ddp
