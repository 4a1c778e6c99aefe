"""A stage of a pipeline: a part of a model, run forward and backward microbatch by microbatch.

`Stage` keeps what each microbatch needs from its forward to its backward. What depends on the array
library is in its subclasses, among which `make_stage` chooses by the module:

============================================  ====================================================
module                                        stage
============================================  ====================================================
``torch.nn.Module``                           `ferro_dist.integrations.torch.pipeline.stage`
`ferro_dist.integrations.jax.stage.JaxStage`  ``PipelinedJaxStage`` in the same module
with ``forward()`` and ``backward()``         `ferro_dist.parallel.pipeline.handwritten_stage`
============================================  ====================================================
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import inspect
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from ferro_dist import interop
from ferro_dist.parallel.integration import JAX_STAGE, TORCH_MODULE, has_base, integration
from ferro_dist.parallel.pipeline.activation_channel import ArraySpec, Parcel
from ferro_dist.parallel.pipeline.receive_pool import ReceivePool

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["ForwardInput", "LossOf", "Stage", "make_stage", "microbatch_seed", "takes_rng"]

Array = Any
Tree = Any


def microbatch_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Return the seed of the random numbers of one forward, the same in every schedule.

    Parameters
    ----------
    seed : int
        The pipeline's.
    step : int
        How many steps, forwards and evaluations the pipeline has run before this one.
    stage, microbatch : int
        Microbatches are numbered across replicas: with m in each pipeline, those of replica r begin
        at r * m.

    Returns
    -------
    int, from 0 to 2**63 - 1
    """
    key = struct.pack("<Qqqq", seed % (1 << 64), step, stage, microbatch)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `rng`. One written in C that does not tell has none."""
    try:
        return "rng" in inspect.signature(function).parameters
    except ValueError:
        return False


class LossOf(NamedTuple):
    """What the last stage applies to its output in training."""

    function: Callable[[Tree], Any] | None
    """Makes the loss of an output; None if the output is the loss."""
    counts: bool
    """Whether the loss has any weight. If not, its gradient is 0, even where it would be 0 / 0."""

    def value(self, output: Tree) -> Any:
        """Return the loss of an output."""
        return output if self.function is None else self.function(output)


class ForwardInput(NamedTuple):
    """What the forward of one microbatch depends on, besides the weights."""

    parcel: Parcel
    seed: int | None
    """Where the forward's random numbers start; None to leave the user's generators alone."""
    loss_of: LossOf | None = None
    """Applied by the last stage in training: the output is then the loss. Else None."""


class Stage(abc.ABC):
    """One stage.

    Attributes
    ----------
    module : object
        What the user gave.
    number : int
        Its place in the pipeline.
    is_checkpointed : bool
        Whether only inputs are kept, and forward is run once more before backward.
    pool : ReceivePool
        Host memory for what it receives.
    library : str or None
        The only one whose arrays its module takes, if there is one.
    """

    library: ClassVar[str | None] = None

    def __init__(self, module: Any) -> None:
        self.module = module
        self.number = 0
        self.is_checkpointed = False
        self.pool = ReceivePool()
        self._saved: dict[int, Any] = {}
        self._deferred: dict[int, Any] = {}

    # What the executor asks for

    def forward(self, microbatch: int, given: ForwardInput) -> Parcel:
        """Run forward and keep what backward needs."""
        given = self._with_seed(given, self.is_checkpointed)
        run = self._run_replayable if self.is_checkpointed else self._run_forward
        output, self._saved[microbatch] = run(given)
        return output

    def evaluate(self, given: ForwardInput) -> Parcel:
        """Run forward and keep nothing."""
        given = self._with_seed(given, will_replay=False)
        return self._run_unsaved(given, will_replay=False)

    def backward(self, microbatch: int, gradients: Sequence[Any]) -> list[Array | None]:
        """Add to the weights' gradients, and return those of the input's arrays.

        `gradients` has one entry for each array of the output: an array, None for no
        gradient, or a float if the output is the loss.
        """
        return self._run_backward(self._take_saved(microbatch), gradients)

    def backward_input(self, microbatch: int, gradients: Sequence[Any]) -> list[Array | None]:
        """Return the gradients of the input's arrays, and leave the weights' for later."""
        saved = self._take_saved(microbatch)
        of_input, self._deferred[microbatch] = self._run_backward_input(saved, gradients)
        return of_input

    def backward_weight(self, microbatch: int) -> None:
        """Add to the weights' gradients what `backward_input` has left."""
        self._run_backward_weight(self._deferred.pop(microbatch))

    def forget(self) -> None:
        """Drop everything that is kept for backwards that will not come."""
        self._saved.clear()
        self._deferred.clear()

    def interrupt(self, error: BaseException) -> None:
        """Tell replicas that wait inside the module itself for what will not come."""
        return

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the module is in evaluation mode."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def untouched(self) -> contextlib.AbstractContextManager[None]:
        """Return a context after which gradients and state are what they were before."""

    # Arrays between stages

    def check_given(self, array: Array, name: str) -> None:
        """Raise TypeError for an array of the user's that the module cannot take."""
        return

    @abc.abstractmethod
    def describe(self, array: Array) -> ArraySpec: ...

    def describe_gradient(self, weight: Array) -> ArraySpec:
        """Describe the gradient that a weight gets."""
        return self.describe(weight)

    def note_thread(self) -> None:
        """Note how the calling thread computes: on which stream of a GPU, how precisely.

        Called before each run.
        """
        return

    def receiving(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a thread allocates and receives arrays for this stage."""
        return contextlib.nullcontext()

    def take_over(self, received: Array) -> None:
        """Note that a received array on a GPU is used on the current stream from now on."""
        return

    @abc.abstractmethod
    def allocate(self, spec: ArraySpec) -> Array:
        """Make room for an array that will be received. Called by any thread."""

    def deliver(self, spec: ArraySpec, received: Array) -> Array:
        """Turn what was received into an input. Called by any thread."""
        return received

    def microbatch_input(self, part: Array, whole: Array) -> Array:
        """Make a part of what the user gave the first stage's input."""
        return part

    def deliver_input_gradients(
        self, arrays: Sequence[Array], gradients: Sequence[Array | None]
    ) -> None:
        """Give the user the gradients of the first stage's input, where there is a place for it."""
        return

    def converted(self, gradients: Sequence[Array | None]) -> list[Array | None]:
        """Turn gradients from the form that stages exchange into this stage's own, or back.

        Libraries differ in what they call the gradient of a complex array. Stages exchange torch's.
        """
        return list(gradients)

    @abc.abstractmethod
    def item(self, loss: Array) -> float:
        """Return the value of a loss."""

    @abc.abstractmethod
    def one_like(self, loss: Array) -> Array:
        """Return the gradient of a loss with respect to itself."""

    @abc.abstractmethod
    def zeros(self, like: Array) -> Array:
        """Return zeros in the shape of an array."""

    # Weights

    @abc.abstractmethod
    def parameters(self) -> dict[str, Array]:
        """Return the weights that are trained, by name."""

    def parameter(self, name: str) -> Array:
        """Return one weight."""
        return self.parameters()[name]

    def gradient_owner(self, name: str) -> object:
        """Return an object that all names of one gradient have in common, also in other stages."""
        return self.parameter(name)

    def buffers(self) -> dict[str, Array]:
        """Return state that is no weight, by name."""
        return {}

    def check_shareable(self, what: str, array: Array) -> None:
        """Raise unless a parameter or buffer can be overwritten with that of another rank.

        `what` names it: ``"'weight' of stage 0"``.
        """
        return

    def check_lasting(self, names: Iterable[str]) -> None:
        """Raise ValueError unless what is written to some weights and their gradients stays."""
        return

    @abc.abstractmethod
    def load(self, name: str, value: Array) -> None:
        """Overwrite a parameter or buffer."""

    @abc.abstractmethod
    def gradients(self, names: Sequence[str]) -> list[Array | None]:
        """Return the gradients of some weights; None where there is none."""

    @abc.abstractmethod
    def set_gradients(self, names: Sequence[str], gradients: Sequence[Array]) -> None: ...

    @abc.abstractmethod
    def take_gradients(self, names: Sequence[str]) -> list[Array | None]:
        """Return gradients, and leave none, or zeros, in their places."""

    @abc.abstractmethod
    def add_gradients(self, names: Sequence[str], gradients: Sequence[Array]) -> None:
        """Put back gradients that were taken, and add what has come since."""

    def plain(self, weight: Array) -> Array:
        """Return a weight as an array that can be sent."""
        return interop.contiguous(weight)

    @abc.abstractmethod
    def new_bucket(self, group: Backend, like: Array, count: int) -> Array:
        """Return zeros in the group's best memory, for gradients of weights like this one."""

    @abc.abstractmethod
    def place(self, bucket: Array, offset: int, like: Array) -> Array:
        """Return a view of a part of a bucket, in the shape of `like`."""

    @abc.abstractmethod
    def write(self, places: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Copy gradients to their places, zeros where there is none."""

    @abc.abstractmethod
    def read(self, places: Sequence[Array]) -> list[Array]:
        """Return copies of what is in some places."""

    @abc.abstractmethod
    def mark(self, bucket: Array, first: int, are_there: Sequence[bool]) -> None:
        """Write the last elements of a bucket, from the one numbered `first`: 1 or 0 each."""

    def are_marked(self, bucket: Array, first: int) -> list[bool]:
        """Return which elements of a bucket, from the one numbered `first`, are not 0."""
        found: list[bool] = (bucket[first:] != 0).tolist()
        return found

    def _with_seed(self, given: ForwardInput, will_replay: bool) -> ForwardInput:
        if given.seed is not None:
            return given
        return given._replace(seed=self._draw_seed(will_replay))

    # What subclasses do; they keep nothing of a microbatch themselves

    def _draw_seed(self, will_replay: bool) -> int | None:
        """Return a seed for a forward that was given none, if it needs one."""
        return None

    @abc.abstractmethod
    def _run_forward(self, given: ForwardInput) -> tuple[Parcel, Any]: ...

    @abc.abstractmethod
    def _run_unsaved(self, given: ForwardInput, will_replay: bool) -> Parcel: ...

    @abc.abstractmethod
    def _run_backward(self, saved: Any, gradients: Sequence[Any]) -> list[Array | None]: ...

    def _run_backward_input(
        self, saved: Any, gradients: Sequence[Any]
    ) -> tuple[list[Array | None], Any]:
        """Where backward cannot be divided, run all of it now."""
        return self._run_backward(saved, gradients), None

    def _run_backward_weight(self, deferred: Any) -> None:
        return

    def _run_replayable(self, given: ForwardInput) -> tuple[Parcel, Any]:
        """Run forward and keep only what `_replay` needs."""
        return self._run_unsaved(given, will_replay=True), given

    def _replay(self, kept: Any) -> Any:
        """Run forward again, for what it saves."""
        return self._run_forward(kept)[1]

    def _take_saved(self, microbatch: int) -> Any:
        saved = self._saved.pop(microbatch)
        return self._replay(saved) if self.is_checkpointed else saved


def make_stage(module: Any) -> Stage:
    """Return the stage that runs a module.

    Raises
    ------
    TypeError
        A pipeline cannot run it.
    """
    if isinstance(module, Stage):
        return module
    if has_base(module, TORCH_MODULE):
        return cast(Stage, integration("torch.pipeline.stage").TorchStage(module))
    if has_base(module, JAX_STAGE):
        return cast(Stage, integration("jax.stage").PipelinedJaxStage(module))
    if callable(getattr(module, "forward", None)) and callable(getattr(module, "backward", None)):
        from ferro_dist.parallel.pipeline.handwritten_stage import HandwrittenStage

        return HandwrittenStage(module)
    raise TypeError(
        f"Pipeline: a stage is a torch.nn.Module, a JaxStage, or an object with forward() and "
        f"backward(), not {_described(module)}"
    )


def _described(module: Any) -> str:
    if isinstance(module, type):
        return f"the class {module.__qualname__}: make one of it"
    return type(module).__qualname__
