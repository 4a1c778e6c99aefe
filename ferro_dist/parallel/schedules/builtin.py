"""The well-known schedules, each a pure function of the pipeline's size.

Each returns one list of actions for each rank: forwards and backwards, for any number of
microbatches. `insert_messages` and `insert_reductions` add what moves between ranks. All of
them run the backwards of a stage in the order of its microbatches, so a stage's gradients are
summed in the same order, and have the same bits, whatever the schedule.

With p ranks, m microbatches, v stages on a rank, and F, I, W the times of a rank's forward,
input gradient and weight gradient, B = I + W, w the shortest of the three:

| schedule     | idle over useful time            | most live microbatches on rank r      |
|--------------|----------------------------------|---------------------------------------|
| gpipe        | (p-1) / m                        | m                                     |
| 1f1b         | (p-1) / m                        | p - r                                 |
| interleaved  | (p-1) / (v m)                    | p + (p-1)/v on rank 0, less elsewhere |
| zb_h1        | (p-1)(F+I-w) / (m (F+I+W))       | p                                     |
| zb_v         | (p-1) / (6m) if F = I = W        | p                                     |

The figures hold if m is at least p, with zb_v at least 2p-1; those of interleaved's memory only if
p divides m: see `interleaved_1f1b`.

References
----------
Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", NeurIPS 2019.
D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021: 1F1B, there
called PipeDream-Flush.
D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021: interleaved 1F1B.
P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024: ZB-H1.
P. Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024: ZB-V.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ferro_dist.parallel.schedules.action import Action, ActionKind, B, F, I, W
from ferro_dist.parallel.schedules.arguments import check_count
from ferro_dist.parallel.schedules.placement import stages_of_v

__all__ = ["gpipe", "interleaved_1f1b", "one_f_one_b", "zb_h1", "zb_v"]


def gpipe(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Run all forwards, then all backwards; one stage on a rank.

    The paper's figure runs backwards last microbatch first, which changes neither the
    bubble nor the memory.
    """
    p, m = _positive(num_ranks, num_microbatches)
    return [[Action(rank, kind, i) for kind in (F, B) for i in range(m)] for rank in range(p)]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Run backwards as early as possible, then one forward for each; one stage on a rank.

    1. Warm up: rank r runs p-1-r forwards, as many as it takes until the first gradient is back.
    2. Steady state: one forward, one backward.
    3. Drain: the backwards that are left.
    """
    return interleaved_1f1b(num_ranks, num_microbatches, 1)


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> list[list[Action]]:
    """Run 1F1B over v stages on each rank, rank r having stages r, r+p, r+2p, ...

    Microbatches pass in groups of p through the stages of a rank, one stage after the other: a
    group is back from the last rank just when the first rank has sent all of it on its way.

    The original needs m to be a multiple of p. Here m microbatches are divided as evenly as
    possible into groups of p or more, which keeps the bubble at (p-1) / (v m) for any m from p up.
    A group of g > p costs the memory of (g-p)(v-1)/v additional microbatches.
    """
    p, m = _positive(num_ranks, num_microbatches)
    v = check_count("stages_per_rank", stages_per_rank)
    groups = _even_groups(p, m)
    return [_one_f_one_b(rank, p, groups, v) for rank in range(p)]


def _even_groups(p: int, m: int) -> list[range]:
    """Divide the microbatches into as many groups of p or more as possible, largest first."""
    num_groups = max(m // p, 1)
    size, num_larger = divmod(m, num_groups)
    ends = list(itertools.accumulate(size + (i < num_larger) for i in range(num_groups)))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _one_f_one_b(rank: int, p: int, groups: list[range], v: int) -> list[Action]:
    stages = range(rank, p * v, p)
    forwards = [Action(s, F, m) for group in groups for s in stages for m in group]
    backwards = [Action(s, B, m) for group in groups for s in reversed(stages) for m in group]
    # With one stage, a microbatch gets one rank further in the time of one forward. With several it
    # queues behind those of other stages, and the first gradient takes twice as many forwards.
    steps_to_last_rank = p - 1 - rank
    num_first = steps_to_last_rank
    if v > 1:
        num_first = 2 * steps_to_last_rank + (v - 1) * len(groups[0])
    return [*forwards[:num_first], *_alternate(forwards[num_first:], backwards)]


def _alternate(forwards: list[Action], backwards: list[Action]) -> Iterator[Action]:
    for pair in itertools.zip_longest(forwards, backwards):
        yield from (action for action in pair if action is not None)


def zb_h1(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Run 1F1B with split backwards, the weights' part r microbatches late; one stage a rank.

    A rank hands the input's gradient on before it turns to its weights. As rank r is r microbatches
    late with these, r of them are left for the end, where it would otherwise wait for gradients.
    This raises its live microbatches from p-r to the p that rank 0 has anyway.
    """
    p, m = _positive(num_ranks, num_microbatches)
    return [_zb_h1_of_rank(rank, p, m) for rank in range(p)]


def _zb_h1_of_rank(rank: int, p: int, m: int) -> list[Action]:
    num_warmup = min(p - 1 - rank, m)
    actions = [Action(rank, F, i) for i in range(num_warmup)]
    for i in range(m):
        if num_warmup + i < m:
            actions.append(Action(rank, F, num_warmup + i))
        actions.append(Action(rank, I, i))
        if i >= rank:
            actions.append(Action(rank, W, i - rank))
    actions += [Action(rank, W, i) for i in range(max(m - rank, 0), m)]
    return actions


def zb_v(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Run two stages on each rank, rank r having r and 2p-1-r, with split backwards.

    The last stage is on the first rank, so backwards start there as early as on any other, and
    all ranks warm up and drain alike. In four parts, for rank r:

    1. Warm up: 2(p-r)-1 forwards down, r in each direction, and p-r up with their backwards.
    2. Steady state: a forward and its whole backward, down and up in turn.
    3. Drain: input gradients first, since other ranks wait for them.
    4. The weight gradients that were put off.

    It is built for at least 2p-1 microbatches; for fewer, the surplus is left out.
    """
    p, m = _positive(num_ranks, num_microbatches)
    padded = max(m, 2 * p - 1)
    lists = [_ZBVRank(rank, p, padded).actions for rank in range(p)]
    return [[a for a in actions if a.microbatch < m] for actions in lists]


class _ZBVRank:
    """One rank's list while it is written. Each kind on each stage takes microbatches in order."""

    def __init__(self, rank: int, p: int, m: int) -> None:
        self.actions: list[Action] = []
        self._down, self._up = stages_of_v(rank, p)
        self._counts = {(s, kind): 0 for s in (self._down, self._up) for kind in (F, I, W)}
        self._warm_up(rank, p)
        self._run_steadily(m)
        self._drain(rank, p)
        self._finish_weights()

    def _warm_up(self, rank: int, p: int) -> None:
        self._add(2 * (p - rank) - 1, (self._down, F))
        self._add(rank, (self._up, F), (self._down, F))
        self._add(p - rank, (self._up, F), (self._up, I), (self._up, W))

    def _run_steadily(self, m: int) -> None:
        down, up, counts = self._down, self._up, self._counts
        while counts[up, F] < m:
            if counts[down, F] < m:
                self._add(1, (down, F))
            self._add(1, (down, I), (down, W), (up, F), (up, I), (up, W))

    def _drain(self, rank: int, p: int) -> None:
        self._add(rank, (self._down, I), (self._up, I))
        self._add(p - rank, (self._down, I), (self._down, W))

    def _finish_weights(self) -> None:
        for stage in (self._up, self._down):
            self._add(self._counts[stage, I] - self._counts[stage, W], (stage, W))

    def _add(self, times: int, *steps: tuple[int, ActionKind]) -> None:
        for _ in range(times):
            for stage, kind in steps:
                self.actions.append(Action(stage, kind, self._counts[stage, kind]))
                self._counts[stage, kind] += 1


def _positive(num_ranks: int, num_microbatches: int) -> tuple[int, int]:
    # As ints: an Action that held NumPy's would be refused by what reads the lists.
    return (
        check_count("num_ranks", num_ranks),
        check_count("num_microbatches", num_microbatches),
    )
