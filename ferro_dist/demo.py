"""Train a classifier of handwritten digits on several processes, and check the result.

    ferrorun -n 2 -m ferro_dist.demo

Each rank computes the gradients of its share of every batch, DDP adds them up over the ranks, and
all ranks take the same step. Then rank 0 trains the same model once more by itself, on whole
batches: both runs must end with the same weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import ferro_dist as fd

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

Array = np.ndarray[Any, Any]

REQUIRED_ACCURACY = 0.96
TEST_IMAGES = 360
LEARNING_RATE, MOMENTUM = 0.1, 0.9

# The ranks add the same numbers as one process, but in a different order. That changes the last
# bit of a float64, 1e-16 of its value; after some hundred steps, differences of 1e-15 to 1e-14 were
# measured. Data that is lost or counted twice changes the second digit.
ALLOWED_DIFFERENCE = 1e-9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo in the group that the environment names; return the exit code."""
    options = Options.parse(arguments)
    with fd.init() as backend:
        return 0 if run(backend, options) else 1


def run(backend: Backend, options: Options) -> bool:
    """Train on all ranks, then on one; say how it went and return whether all is well."""
    say = print if backend.rank == 0 else silence
    digits = Digits.load()
    say(f"{len(digits.train_labels)} handwritten digits, world size {backend.world_size}")

    model = Classifier(options.hidden, options.seed)
    accuracy = train_on_all_ranks(model, digits, options, backend, say)
    alone = train_on_rank_0(digits, options, backend)
    difference = largest_difference(model, alone, backend)

    is_accurate = accuracy >= REQUIRED_ACCURACY
    if not is_accurate:
        say(f"FAILED: the test accuracy is below {REQUIRED_ACCURACY:.0%}")
    is_equal = difference <= ALLOWED_DIFFERENCE
    verdict = "equals" if is_equal else "FAILED: differs from"
    say(f"{verdict} single-process training: max difference {difference:.1e}")
    return is_accurate and is_equal


def train_on_all_ranks(
    model: Classifier,
    digits: Digits,
    options: Options,
    backend: Backend,
    say: Callable[[str], None],
) -> float:
    """Train the model data-parallel, report on the way, return the test accuracy."""
    # Each rank divides its gradients by the size of the whole batch. Only a sum is left to do,
    # which is right for shares of uneven size, too.
    ddp = fd.DDP(model, backend, average="sum")
    model.gradients = ddp.gradient_buffers()
    training, communication = Stopwatch(), Stopwatch()
    trainer = Trainer(model, digits, options)
    train_epoch = training.timed(trainer.train_epoch)
    synchronize = communication.timed(ddp.sync_gradients)

    for epoch in range(1, options.epochs + 1):
        train_epoch(synchronize, backend.rank, backend.world_size)
        loss, accuracy = evaluate(model, digits, backend)
        epoch_s, communication_s = training.lap(), communication.lap()
        say(
            f"epoch {epoch:3}   loss {loss:.4f}   test accuracy {accuracy:7.2%}   "
            f"{epoch_s * 1e3:6.1f} ms, {communication_s / epoch_s:.0%} of it communication"
        )
    say(f"loss {loss:.4f}")
    say(f"test accuracy {accuracy:.2%}")
    say(f"time in communication {communication.total_s:.3f} s of {training.total_s:.3f} s")
    return accuracy


def train_on_rank_0(digits: Digits, options: Options, backend: Backend) -> Classifier:
    """Train the model on whole batches in one process; all ranks get the result."""
    model = Classifier(options.hidden, options.seed)
    if backend.rank == 0:
        trainer = Trainer(model, digits, options)
        for _ in range(options.epochs):
            trainer.train_epoch()
    for weight in model.weights.values():
        fd.broadcast(weight, backend, root=0, out=weight)
    return model


def largest_difference(model: Classifier, other: Classifier, backend: Backend) -> float:
    """Return how far any weight of any rank's model is from the other model's."""
    differences = [
        np.abs(weight - other.weights[name]).max() for name, weight in model.weights.items()
    ]
    # Infinity if a weight is NaN, which may get lost in a maximum.
    largest = np.nan_to_num(np.max(differences), nan=np.inf)
    return float(fd.allreduce(np.atleast_1d(largest), backend, fd.ReduceOp.MAX)[0])


def evaluate(model: Classifier, digits: Digits, backend: Backend) -> tuple[float, float]:
    """Return the loss on the training images and the accuracy on the test images.

    Each rank evaluates its share.
    """
    share = slice(backend.rank, None, backend.world_size)
    labels = digits.train_labels[share]
    of_label = model(digits.train_images[share])[np.arange(len(labels)), labels]
    loss = -np.log(np.maximum(of_label, np.finfo(float).tiny)).sum()
    answers = model(digits.test_images[share]).argmax(axis=1)
    correct = np.count_nonzero(answers == digits.test_labels[share])
    loss, correct = fd.allreduce(np.array([loss, correct], float), backend)
    return float(loss / len(digits.train_labels)), float(correct / len(digits.test_labels))


class Trainer:
    """Stochastic gradient descent with momentum. The seed decides the order of the images."""

    def __init__(self, model: Classifier, digits: Digits, options: Options) -> None:
        self.model = model
        self.digits = digits
        self.batch_size = options.batch_size
        # Small batches have noisy gradients: full steps along them would diverge.
        self.learning_rate = LEARNING_RATE * min(1, options.batch_size / 64)
        self.rng = np.random.default_rng(options.seed)
        self.velocity = {name: np.zeros_like(weight) for name, weight in model.weights.items()}

    def train_epoch(
        self, synchronize: Callable[[], object] | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        """Go once through the training images.

        By default on its own. Otherwise this rank takes its share of every batch, and `synchronize`
        combines the gradients of the shares into those of the whole batch.
        """
        order = self.rng.permutation(len(self.digits.train_labels))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            share = batch[rank::world_size]
            probabilities = self.model(self.digits.train_images[share])
            self.model.backward(probabilities, self.digits.train_labels[share], len(batch))
            if synchronize is not None:
                synchronize()
            self.step()

    def step(self) -> None:
        """Move the weights against their gradients."""
        for name, weight in self.model.weights.items():
            velocity = self.velocity[name]
            velocity *= MOMENTUM
            velocity -= self.learning_rate * self.model.gradients[name]
            weight += velocity


class Classifier:
    """A perceptron with one hidden layer; `parameters` and `grads` make it a module for DDP."""

    def __init__(self, hidden: int, seed: int, inputs: int = 64, classes: int = 10) -> None:
        rng = np.random.default_rng(seed)
        self.weights: dict[str, Array] = {
            "hidden.weight": rng.normal(0, np.sqrt(2 / inputs), (inputs, hidden)),
            "hidden.bias": np.zeros(hidden),
            "output.weight": rng.normal(0, np.sqrt(2 / hidden), (hidden, classes)),
            "output.bias": np.zeros(classes),
        }
        self.gradients = {name: np.zeros_like(weight) for name, weight in self.weights.items()}

    def parameters(self) -> dict[str, Array]:
        """Return the weights by name."""
        return self.weights

    def grads(self) -> dict[str, Array]:
        """Return the gradients by the same names."""
        return self.gradients

    def __call__(self, images: Array) -> Array:
        """Return the probability of each class, for each image."""
        w = self.weights
        self.images = images
        self.features = np.maximum(images @ w["hidden.weight"] + w["hidden.bias"], 0)
        scores = self.features @ w["output.weight"] + w["output.bias"]
        exp = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities: Array = exp / exp.sum(axis=1, keepdims=True)
        return probabilities

    def backward(self, probabilities: Array, labels: Array, batch_size: int) -> None:
        """Compute the gradients of the cross-entropy of these images, divided by `batch_size`.

        They are written into the arrays of `gradients`, wherever those are: DDP's are in memory
        that all ranks can reach, and are added up without being copied.
        """
        d_scores = probabilities.copy()
        d_scores[np.arange(len(labels)), labels] -= 1
        d_scores /= batch_size
        d_features = d_scores @ self.weights["output.weight"].T * (self.features > 0)
        np.matmul(self.features.T, d_scores, out=self.gradients["output.weight"])
        np.sum(d_scores, axis=0, out=self.gradients["output.bias"])
        np.matmul(self.images.T, d_features, out=self.gradients["hidden.weight"])
        np.sum(d_features, axis=0, out=self.gradients["hidden.bias"])


@dataclass
class Digits:
    """The 1797 handwritten digits of UCI that come with scikit-learn, 8 × 8 pixels each."""

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array

    @classmethod
    def load(cls) -> Digits:
        """Put some digits aside for the test: chosen at random, but the same in every run."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise SystemExit(
                f"ferro_dist.demo takes its data from scikit-learn, which is missing ({error}).\n"
                'Install it: pip install "ferro_dist[demo]"'
            ) from error
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        test, rest = order[:TEST_IMAGES], order[TEST_IMAGES:]
        return cls(images[rest] / 16, labels[rest], images[test] / 16, labels[test])


class Stopwatch:
    """Adds up how long the functions take that it times."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._lap_began_at = 0.0

    def timed(self, function: Callable[..., object]) -> Callable[..., None]:
        """Return the function, timed."""

        def call(*arguments: object) -> None:
            began = time.perf_counter()
            function(*arguments)
            self.total_s += time.perf_counter() - began

        return call

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        seconds, self._lap_began_at = self.total_s - self._lap_began_at, self.total_s
        return seconds


@dataclass
class Options:
    """What the command line decides; equal on all ranks."""

    epochs: int = 30
    batch_size: int = 64
    hidden: int = 128
    seed: int = 0

    @classmethod
    def parse(cls, arguments: Sequence[str] | None) -> Options:
        """Read the command line."""
        parser = argparse.ArgumentParser(
            prog="python -m ferro_dist.demo",
            description="Train a classifier of handwritten digits, data-parallel.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add = parser.add_argument
        add("--epochs", type=positive, default=cls.epochs, help="passes over the data")
        add("--batch-size", type=positive, default=cls.batch_size, help="images of all ranks")
        add("--hidden", type=positive, default=cls.hidden, help="width of the hidden layer")
        add("--seed", type=natural, default=cls.seed, help="of weights and order of the images")
        return cls(**vars(parser.parse_args(arguments)))


def natural(text: str) -> int:
    """Parse a number that is not negative."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def positive(text: str) -> int:
    """Parse a number above zero."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def silence(_: str) -> None:
    """Print nothing: one rank speaks for all."""


if __name__ == "__main__":
    sys.exit(main())
