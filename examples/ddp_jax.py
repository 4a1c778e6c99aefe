"""Train a network in JAX on several processes, the whole step compiled.

    ferrorun -n 2 examples/ddp_jax.py

Needs jax and scikit-learn. `tap` is the identity; in backward, inside the compiled program,
it hands over each bucket of gradients as soon as it is computed, and returns the average.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import ferro_dist as fd

SHARE = 32  # images of each rank in every batch; one size, so that the step is compiled once
LEARNING_RATE = 0.2
TEST_IMAGES = 360

Params = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the ranks may share a GPU

    with fd.init() as backend:
        ddp = fd.DDP(make_params([64, 96, 48, 10]), backend)
        params = ddp.module  # those of rank 0, on all ranks
        train_set, test_set = load_data()

        @jax.jit
        def step(params: Params, x: Any, y: Any) -> Params:
            gradients = jax.grad(lambda p: loss(ddp.tap(p), x, y))(params)
            return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)

        batch_size = SHARE * backend.world_size
        for epoch in range(epochs):
            # The same order on all ranks; each takes its share of every batch.
            order = np.random.default_rng(epoch).permutation(len(train_set[1]))
            for start in range(0, len(order) - batch_size + 1, batch_size):
                rows = order[start : start + batch_size][backend.rank :: backend.world_size]
                params = step(params, train_set[0][rows], train_set[1][rows])
            if backend.rank == 0:
                accuracy = (forward(params, test_set[0]).argmax(1) == test_set[1]).mean()
                print(f"epoch {epoch + 1}: test accuracy {float(accuracy):.1%}")
        ddp.verify(params)  # the same on all ranks, bit for bit


def make_params(widths: list[int]) -> Params:
    rng = np.random.default_rng(0)
    return [
        {
            "weight": jnp.asarray(rng.normal(size=(n, m)) / np.sqrt(n), jnp.float32),
            "bias": jnp.zeros(m),
        }
        for n, m in itertools.pairwise(widths)
    ]


def forward(params: Params, x: Any) -> Any:
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def loss(params: Params, x: Any, y: Any) -> Any:
    log_probabilities = jax.nn.log_softmax(forward(params, x))
    return -jnp.take_along_axis(log_probabilities, y[:, None], axis=1).mean()


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (images[order] / 16).astype(np.float32), labels[order]
    return (x[TEST_IMAGES:], y[TEST_IMAGES:]), (x[:TEST_IMAGES], y[:TEST_IMAGES])


if __name__ == "__main__":
    main()
