"""Train a small transformer on this repository's own documents, one part of it on each rank.

    ferrorun -n 2 examples/pipeline_torch.py
    ferrorun -n 3 examples/pipeline_torch.py --schedule zb_h1 --steps 200 --plot timeline.png

It learns to predict the next character, and compares at the end the time that the schedule should
have taken with the time that it took.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ferro_dist as fd

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
CONTEXT = 64
WIDTH = 64
BATCH = 32
NUM_MICROBATCHES = 8


class Embedding(nn.Module):
    """Characters and their positions."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))

    def forward(self, tokens: Any) -> Any:
        return self.characters(tokens) + self.places


class Block(nn.Module):
    """Attention to what came before, and two layers."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, h: Any) -> Any:
        rows, length, _ = h.shape
        heads = self.qkv(self.norm_1(h)).view(rows, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return h + self.layers(self.norm_2(h))


def read_documents() -> tuple[torch.Tensor, int]:
    """Return the text as numbers, and the number of different characters."""
    root = Path(__file__).parent.parent
    text = "".join((root / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    return torch.tensor([numbers[character] for character in text]), len(characters)


def batches(text: torch.Tensor, seed: int) -> Any:
    """Yield pieces of the text, and the same one character later; equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def next_character_loss(logits: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b or zb_h1")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", help="write a picture of the last step there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks make the same model, and keep a part of it
    text, num_characters = read_documents()
    layers = [Block() for _ in range(4)]
    model = nn.Sequential(Embedding(num_characters), *layers, nn.Linear(WIDTH, num_characters))

    with fd.init() as backend:
        if backend.world_size < 2:
            raise SystemExit("one rank is no pipeline: ferrorun -n 2 examples/pipeline_torch.py")
        stage = fd.split_sequential(model, backend.world_size)[backend.rank]
        pipe = fd.Pipeline(stage, backend, NUM_MICROBATCHES, options.schedule)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
        data = batches(text, seed=1)
        for step in range(options.steps):
            x, y = next(data)
            loss = pipe.step(x, y, next_character_loss)
            optimizer.step()
            optimizer.zero_grad()
            if backend.rank == 0 and (step % 20 == 0 or step == options.steps - 1):
                print(f"step {step}: loss {loss:.3f}")
        plan = pipe.plan()
        if backend.rank == 0:
            print(plan)
            if options.plot:
                plan.plot(options.plot)


if __name__ == "__main__":
    main()
