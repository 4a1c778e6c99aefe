"""Train a network written by hand in NumPy, on several processes.

    ferrorun -n 2 examples/ddp_numpy.py

Needs scikit-learn, for its handwritten digits. Any object with `parameters()` and
`grads()` can be wrapped. Backward reports when the gradients of a layer are final: they
are then averaged while it computes those of the previous layer.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits

import ferro_dist as fd

BATCH_SIZE = 64  # of all ranks together
LEARNING_RATE = 0.2
TEST_IMAGES = 360


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    with fd.init() as backend:
        network = Network([64, 96, 48, 10])
        # Each rank divides its loss by the size of the whole batch: shares may be uneven.
        ddp = fd.DDP(network, backend, average="sum")
        (images, labels), test_set = load_data()
        for epoch in range(epochs):
            # The same order on all ranks; each takes its share of every batch.
            order = np.random.default_rng(epoch).permutation(len(labels))
            for start in range(0, len(order), BATCH_SIZE):
                batch = order[start : start + BATCH_SIZE]
                rows = batch[backend.rank :: backend.world_size]
                network.backward(images[rows], labels[rows], len(batch), ddp.ready)
                ddp.sync_gradients()
                network.descend(LEARNING_RATE)
            if backend.rank == 0:
                accuracy = (network.forward(test_set[0])[-1].argmax(1) == test_set[1]).mean()
                print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")
        ddp.verify()  # all ranks have the same weights, bit for bit


class Network:
    """Fully connected layers with tanh between them, and a softmax at the end."""

    def __init__(self, widths: list[int]) -> None:
        rng = np.random.default_rng(0)
        self.num_layers = len(widths) - 1
        self.weights: dict[str, np.ndarray] = {}
        for i, (n, m) in enumerate(itertools.pairwise(widths)):
            self.weights[f"{i}.weight"] = rng.normal(size=(n, m)) / np.sqrt(n)
            self.weights[f"{i}.bias"] = np.zeros(m)
        self.gradients = {name: np.zeros_like(weight) for name, weight in self.weights.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        return self.weights

    def grads(self) -> dict[str, np.ndarray]:
        return self.gradients

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input of each layer, and the probabilities at the end."""
        activations = [x]
        for i in range(self.num_layers):
            x = x @ self.weights[f"{i}.weight"] + self.weights[f"{i}.bias"]
            if i < self.num_layers - 1:
                x = np.tanh(x)
            activations.append(x)
        exp = np.exp(x - x.max(axis=1, keepdims=True))
        activations[-1] = exp / exp.sum(axis=1, keepdims=True)
        return activations

    def backward(
        self, x: np.ndarray, labels: np.ndarray, batch_size: int, ready: Callable[[str], None]
    ) -> None:
        """Compute the gradients of the cross-entropy, the last layer's first."""
        activations = self.forward(x)
        d = activations.pop()
        d[np.arange(len(labels)), labels] -= 1
        d /= batch_size
        for i in reversed(range(self.num_layers)):
            x = activations.pop()
            np.matmul(x.T, d, out=self.gradients[f"{i}.weight"])
            np.sum(d, axis=0, out=self.gradients[f"{i}.bias"])
            ready(str(i))
            d = d @ self.weights[f"{i}.weight"].T * (1 - x**2)

    def descend(self, learning_rate: float) -> None:
        for name, weight in self.weights.items():
            weight -= learning_rate * self.gradients[name]


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = images[order] / 16, labels[order]
    return (x[TEST_IMAGES:], y[TEST_IMAGES:]), (x[:TEST_IMAGES], y[:TEST_IMAGES])


if __name__ == "__main__":
    main()
