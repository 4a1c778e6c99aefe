"""Train a convolutional network on handwritten digits, on several processes.

    ferrorun -n 2 examples/ddp_torch.py

Needs torch and scikit-learn. The model and its training are those of one process, but for the three
lines with `fd.` in them; each rank takes its share of the rows, and rank 0 reports.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import ferro_dist as fd

BATCH_SIZE = 64  # of all ranks together
TEST_IMAGES = 360


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # the ranks share the cores

    with fd.init() as backend:
        model = fd.convert_sync_batchnorm(make_model(), backend)
        ddp = fd.DDP(model, backend)
        train_set, test_set = load_data()
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
        for epoch in range(epochs):
            # The same order on all ranks; each takes its share of every batch.
            order = np.random.default_rng(epoch).permutation(len(train_set[1]))
            for start in range(0, len(order), BATCH_SIZE):
                batch = order[start : start + BATCH_SIZE]
                train_step(ddp, optimizer, train_set, batch[backend.rank :: backend.world_size])
            accuracy = evaluate(ddp, test_set)
            if backend.rank == 0:
                print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")
        ddp.verify()  # all ranks have the same model, bit for bit


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def load_data() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order] / 16).float().view(-1, 1, 8, 8)
    y = torch.from_numpy(labels[order])
    return (x[TEST_IMAGES:], y[TEST_IMAGES:]), (x[:TEST_IMAGES], y[:TEST_IMAGES])


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    rows: np.ndarray,
) -> None:
    model.train()
    images, labels = data[0][rows], data[1][rows]
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # gradients are averaged when it returns
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    model.eval()
    images, labels = data
    return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    main()
