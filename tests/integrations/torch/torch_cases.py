"""What is trained on many ranks and on one, to be compared: a model, its batches, its loss."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import ferro_dist as fd

STEPS = 20
ROWS_OF_RANK = 4

# Ranks that are threads share torch's generator.
_seeding = threading.Lock()


def optimizer_of(module: Any) -> Any:
    # Weight decay moves a parameter whose gradient is zeros, and not one without a gradient.
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes
    ----------
    build : callable
        Makes the module; torch's generator was seeded.
    loss : callable
        Of the module, a batch and the number of the share of the step's data that the batch
        is, of the step. A mean over the rows.
    prepare : callable
        Called with the plain module before each step.
    options : dict
        For DDP.
    make_batch : callable
        Of a generator.
    tolerance : float, optional
        In place of that for float64, where coarser numbers get into them.
    optimizer : callable
        Of a module.
    """

    build: Callable[[], Any]
    loss: Callable[[Any, Any, int, int], Any]
    prepare: Callable[[Any, int], object] = lambda module, step: None
    options: dict[str, Any] = field(default_factory=dict)
    make_batch: Callable[[Any], Any] = lambda generator: torch.randn(
        ROWS_OF_RANK, 6, generator=generator, dtype=torch.float64
    )
    tolerance: float = 1e-10
    optimizer: Callable[[Any], Any] = optimizer_of


def build(case: Case) -> Any:
    with _seeding:
        torch.manual_seed(11)
        return case.build()


def batch(case: Case, share: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + share)
    return case.make_batch(generator)


def train_on_ranks(backend: Any, case: Case, **options: Any) -> dict[str, Any]:
    """Train this rank's replica; return what it has become."""
    # Only root's parameters are right: construction must give them to all.
    module = build(case)
    if backend.rank:
        for parameter in module.parameters():
            parameter.data.add_(1)
    ddp = fd.DDP(module, backend, **case.options, **options)
    optimizer = case.optimizer(ddp)
    for step in range(STEPS):
        case.prepare(module, step)
        case.loss(ddp, batch(case, backend.rank, step), backend.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp.verify()
    return state_of(ddp.into_inner())


def train_alone(case: Case, world_size: int) -> dict[str, Any]:
    """Train on the batches of all ranks in one process."""
    module = build(case)
    optimizer = case.optimizer(module)
    for step in range(STEPS):
        case.prepare(module, step)
        buffers = {}
        for share in range(world_size):
            (case.loss(module, batch(case, share, step), share, step) / world_size).backward()
            if share == 0:
                buffers = {name: b.clone() for name, b in module.named_buffers()}
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])  # of root, which DDP gives to all
        optimizer.step()
        optimizer.zero_grad()
    return state_of(module)


def state_of(module: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_trained_alike(case: Case, replicas: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    # Sums of the same terms in another order: 1e-16 of a float64 in each step, and what twenty
    # steps make of it was below 1e-13. A gradient that is lost, late or counted twice
    # changes the first digits.
    bound = case.tolerance
    for state in replicas:
        assert list(state) == list(alone)
        for name, tensor in state.items():
            assert torch.equal(tensor, replicas[0][name]), f"{name} differs between ranks"
            torch.testing.assert_close(tensor, alone[name], rtol=bound, atol=bound)


# Models


def mean_square(outputs: Any, *_: Any) -> Any:
    return (outputs - 1).square().mean()


def loss_of_output(module: Any, x: Any, share: int, step: int) -> Any:
    return mean_square(module(x))


def mlp() -> Any:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def cnn() -> Any:
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 2, 3),
        nn.BatchNorm2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)).double()


def images(generator: Any) -> Any:
    return torch.randn(ROWS_OF_RANK, 3, 6, 6, generator=generator, dtype=torch.float64)


class LastOfLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def next_token_loss(module: Any, tokens: Any, share: int, step: int) -> Any:
    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Branches(nn.Module):
    """Uses another part in each call, and one part never."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.left, self.right, self.never = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Any, which: str) -> Any:
        return getattr(self, which)(self.trunk(x).tanh())


def branching_loss(module: Any, x: Any, share: int, step: int) -> Any:
    # On some ranks left, on some right; now and then the same on all.
    which = "left" if (share + step) % 2 or step % 5 == 0 else "right"
    return mean_square(module(x, which))


class Repeated(nn.Module):
    """One layer three times, by way of `call`."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.call = call

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for _ in range(3):
            x = self.call(self.again, x).tanh()
        return self.last(x)


class SparseRows(nn.Module):
    """Gradients of its tables are sparse; those of one are dense now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6, sparse=True)
        self.bags = nn.EmbeddingBag(30, 6, mode="sum", sparse=True)
        self.never = nn.Embedding(5, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Any, is_dense: bool) -> Any:
        hidden = self.words(tokens).mean(1)
        if is_dense:
            return self.head(hidden) + hidden @ self.words.weight[:3].T
        return self.head(hidden + self.bags(tokens))


def sparse_loss(module: Any, tokens: Any, share: int, step: int) -> Any:
    return mean_square(module(tokens, is_dense=(share + step) % 3 == 0 or step % 7 == 0))


def plain_sgd(module: Any) -> Any:
    # Of momentum and weight decay torch has no sparse kind.
    return torch.optim.SGD(module.parameters(), lr=0.05)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 6).double(), nn.Linear(6, 6)
        self.coarse = nn.Linear(6, 2).bfloat16()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Any) -> Any:
        x = self.coarse(self.narrow(self.wide(x).float()).bfloat16())
        return (x.double() * self.phase).abs()


class Outputs(nn.Module):
    """Hides its outputs in whatever `pack` makes of them."""

    def __init__(self, pack: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)
        self.pack = pack

    def forward(self, x: Any) -> Any:
        return self.pack(self.a(x), self.b(x))


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


def loss_of_outputs(unpack: Callable[[Any], Any]) -> Callable[[Any, Any, int, int], Any]:
    def loss(module: Any, x: Any, share: int, step: int) -> Any:
        a, b = unpack(module(x))
        return mean_square(a) + 2 * mean_square(b)

    return loss


def freeze_now_and_then(module: Any, step: int) -> None:
    module[0].weight.requires_grad_(step < 5 or step >= 12)
    module[2].requires_grad_(step >= 8)


def loss_of_two_forwards(module: Any, x: Any, share: int, step: int) -> Any:
    return mean_square(module(x)) + mean_square(module(2 * x))


def reentrant(layer: Any, x: Any) -> Any:
    return checkpoint(layer, x, use_reentrant=True)


def non_reentrant(layer: Any, x: Any) -> Any:
    return checkpoint(layer, x, use_reentrant=False)


def double(kind: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: kind(*args).double()


def sequences(generator: Any) -> Any:
    return torch.randn(ROWS_OF_RANK, 7, 6, generator=generator, dtype=torch.float64)


def tokens(generator: Any) -> Any:
    return torch.randint(11, (ROWS_OF_RANK, 6), generator=generator)


def gradient_penalty_loss(module: Any, x: Any, share: int, step: int) -> Any:
    """As in a Wasserstein GAN: a gradient enters the loss."""
    x = x.clone().requires_grad_()
    outputs = module(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return mean_square(outputs) + (slope.norm(dim=1) - 1).square().mean()


CASES = {
    "mlp": Case(mlp, loss_of_output),
    "mlp in many buckets": Case(mlp, loss_of_output, options={"bucket_mb": 3e-4}),
    "cnn with batch norm": Case(cnn, loss_of_output, make_batch=images),
    "cnn in channels last": Case(
        lambda: cnn().to(memory_format=torch.channels_last), loss_of_output, make_batch=images
    ),
    "lstm": Case(double(LastOfLstm), loss_of_output, make_batch=sequences),
    "tied transformer": Case(double(TiedTransformer), next_token_loss, make_batch=tokens),
    "branches": Case(double(Branches), branching_loss),
    "branches in many buckets": Case(double(Branches), branching_loss, options={"bucket_mb": 1e-4}),
    "frozen and unfrozen": Case(mlp, loss_of_output, prepare=freeze_now_and_then),
    "sparse": Case(double(SparseRows), sparse_loss, make_batch=tokens, optimizer=plain_sgd),
    # A bfloat16 has 8 bits: sums in another order differ by 0.4 %.
    "mixed dtypes": Case(MixedDtypes, loss_of_output, tolerance=0.02),
    "layer used again": Case(double(Repeated, lambda layer, x: layer(x)), loss_of_output),
    "re-entrant checkpoints of one layer": Case(
        double(Repeated, reentrant), loss_of_output, options={"bucket_mb": 1e-4}
    ),
    "non-re-entrant checkpoints of one layer": Case(
        double(Repeated, non_reentrant), loss_of_output, options={"bucket_mb": 1e-4}
    ),
    "two forwards, one backward": Case(mlp, loss_of_two_forwards),
    "gradient penalty": Case(mlp, gradient_penalty_loss),
    "nested outputs": Case(
        double(Outputs, lambda a, b: {"x": [(a, "text"), {"y": b}]}),
        loss_of_outputs(lambda out: (out["x"][0][0], out["x"][1]["y"])),
    ),
    "object as output": Case(
        double(Outputs, lambda a, b: SimpleNamespace(a=a, rest=Slotted(b))),
        loss_of_outputs(lambda out: (out.a, out.rest.hidden)),
    ),
    "output that hides its tensors": Case(
        double(Outputs, lambda a, b: lambda: (a, b)), loss_of_outputs(lambda out: out())
    ),
    "some outputs unused": Case(
        double(Outputs, lambda a, b: (a, b)),
        lambda module, x, share, step: mean_square(module(x)[step % 2]),
    ),
    "called past the wrapper": Case(
        mlp, lambda module, x, share, step: mean_square(getattr(module, "module", module)(x))
    ),
}


# Generative adversarial networks


def train_gan(wrap: Callable[[Any], Any], shares: list[int]) -> dict[str, Any]:
    """Train two models, in wrappers perhaps, against each other, on some shares of the data."""
    generator, critic = (
        build(Case(lambda: nn.Linear(6, 6).double(), loss_of_output)),
        build(CASES["mlp"]),
    )
    g, d = wrap(generator), wrap(critic)
    g_optimizer, d_optimizer = optimizer_of(generator), optimizer_of(critic)
    for step in range(STEPS):
        for share in shares:
            real = batch(CASES["mlp"], share, step)
            loss = mean_square(d(real)) + (d(g(real).detach()) ** 2).mean()
            (loss / len(shares)).backward()
        d_optimizer.step()
        d_optimizer.zero_grad()
        for share in shares:
            (mean_square(d(g(batch(CASES["mlp"], share, step)))) / len(shares)).backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()
    return {**state_of(generator), **state_of(critic)}
