"""A simulator of pipelines that shares no code with the library's: clocked, and on plain text.

Time goes in whole ticks. At each tick, every rank does what its list lets it do now, and all ranks
are asked again until none moves. Slow and obvious, to be compared with.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|[FBIW])(\d*)")


@dataclass
class Verdict:
    """How a run ended. `makespan` is None if it did not."""

    makespan: int | None
    busy: list[int]
    peak_live: list[int]
    starts: dict[str, int] = field(default_factory=dict)


class _Queue:
    """Messages from one rank to another: the n-th sent goes to the n-th receive posted."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.posted: list[tuple[str, int]] = []

    def arrivals(self, latency: int) -> dict[str, int]:
        arrivals: dict[str, int] = {}
        last = 0
        for (sent, sent_at), (posted, posted_at) in zip(self.sent, self.posted, strict=False):
            last = max(last, sent_at + latency, posted_at + latency)
            if sent == posted:
                arrivals[sent] = last
        return arrivals


class Oracle:
    """Runs lists of text.

    Parameters
    ----------
    lists : list of list of str
    times : dict of str to int
        By kind. At least 1.
    latency : int
    is_unbuffered : bool
        Whether a send holds up its rank until its receive is posted.
    """

    def __init__(
        self,
        lists: list[list[str]],
        times: dict[str, int],
        latency: int = 0,
        is_unbuffered: bool = False,
    ) -> None:
        self.lists = lists
        self.times = times
        self.latency = latency
        self.is_unbuffered = is_unbuffered
        self.rank_of = {self.split(a)[0]: r for r, actions in enumerate(lists) for a in actions}
        self.last_stage = max(self.rank_of)
        self.has_messages = any("_" in a for actions in lists for a in actions)
        self.queues: dict[tuple[int, int], _Queue] = {}
        self.ended: dict[str, int] = {}
        self.cursor = [0] * len(lists)
        self.busy_until = [0] * len(lists)
        self.network_until = [0] * len(lists)
        self.live: list[set[str]] = [set() for _ in lists]
        self.verdict = Verdict(None, [0] * len(lists), [0] * len(lists))

    @staticmethod
    def split(action: str) -> tuple[int, str, str]:
        match = _ACTION.fullmatch(action)
        assert match, action
        return int(match[1]), match[2], match[3]

    def run(self) -> Verdict:
        total = sum(map(len, self.lists))
        horizon = total * (max(self.times.values()) + self.latency) + 10
        for now in range(horizon):
            while any(self.step(rank, now) for rank in range(len(self.lists))):
                pass
            if self.is_at_end():
                ends = [*self.ended.values(), *self.network_until]
                self.verdict.makespan = max(ends)
                break
        return self.verdict

    def is_at_end(self) -> bool:
        return all(c == len(a) for c, a in zip(self.cursor, self.lists, strict=True))

    def step(self, rank: int, now: int) -> bool:
        if self.busy_until[rank] > now or self.cursor[rank] == len(self.lists[rank]):
            return False
        action = self.lists[rank][self.cursor[rank]]
        stage, kind, microbatch = self.split(action)
        if "_" in kind:
            moved = self.exchange(rank, stage, kind, microbatch, now)
        elif kind == "REDUCE":
            moved = self.reduce(rank, stage, now)
        else:
            moved = self.compute(rank, action, now)
        self.cursor[rank] += moved
        return moved

    def compute(self, rank: int, action: str, now: int) -> bool:
        stage, kind, microbatch = self.split(action)
        if not self.is_ready(stage, kind, microbatch, now):
            return False
        self.busy_until[rank] = now + self.times[kind]
        self.verdict.busy[rank] += self.times[kind]
        self.verdict.starts[action] = now
        self.ended[action] = self.busy_until[rank]
        name = f"{stage}/{microbatch}"
        if kind == "F":
            self.live[rank].add(name)
            self.verdict.peak_live[rank] = max(self.verdict.peak_live[rank], len(self.live[rank]))
        elif kind in "BW":
            self.live[rank].discard(name)
        return True

    def is_ready(self, stage: int, kind: str, microbatch: str, now: int) -> bool:
        if kind == "F":
            return stage == 0 or self.has_from(stage - 1, stage, "F", microbatch, now)
        if kind == "W":
            return self.is_done(f"{stage}I{microbatch}", now)
        if not self.is_done(f"{stage}F{microbatch}", now):
            return False
        return stage == self.last_stage or self.has_from(stage + 1, stage, "B", microbatch, now)

    def has_from(self, source: int, stage: int, way: str, microbatch: str, now: int) -> bool:
        source_rank, rank = self.rank_of[source], self.rank_of[stage]
        makers = [f"{source}F{microbatch}"]
        if way == "B":
            makers = [f"{source}B{microbatch}", f"{source}I{microbatch}"]
        if source_rank == rank:
            return any(self.is_done(maker, now) for maker in makers)
        if not self.has_messages:
            return any(self.is_done(maker, now - self.latency) for maker in makers)
        name = f"{way}:{source}>{stage}:{microbatch}"
        arrivals = self.queue(source_rank, rank).arrivals(self.latency)
        return name in arrivals and arrivals[name] <= now

    def is_done(self, action: str, now: int) -> bool:
        return action in self.ended and self.ended[action] <= now

    def reduce(self, rank: int, stage: int, now: int) -> bool:
        for position in range(self.cursor[rank], len(self.lists[rank])):
            other, kind, _ = self.split(self.lists[rank][position])
            if other == stage and kind in "BW":
                return False
        self.network_until[rank] = max(self.network_until[rank], now) + self.times["REDUCE"]
        return True

    def exchange(self, rank: int, stage: int, kind: str, microbatch: str, now: int) -> bool:
        way = kind[-1]
        step = 1 if kind in ("SEND_F", "RECV_B") else -1
        other = stage + step
        if other not in self.rank_of:
            return False
        if kind.startswith("RECV"):
            queue = self.queue(self.rank_of[other], rank)
            queue.posted.append((f"{way}:{other}>{stage}:{microbatch}", now))
            return True
        makers = (
            {f"{stage}F{microbatch}"}
            if way == "F"
            else {f"{stage}B{microbatch}", f"{stage}I{microbatch}"}
        )
        if not any(self.is_done(maker, now) for maker in makers):
            return False
        queue = self.queue(rank, self.rank_of[other])
        if self.is_unbuffered and len(queue.posted) <= len(queue.sent):
            return False
        queue.sent.append((f"{way}:{stage}>{other}:{microbatch}", now))
        return True

    def queue(self, source: int, destination: int) -> _Queue:
        return self.queues.setdefault((source, destination), _Queue())


def random_lists(rng: random.Random, num_ranks: int, num_stages: int, m: int) -> list[list[str]]:
    """Return a sound schedule without messages, like nothing that anybody would write.

    Stages are on any ranks, backwards in one part or two, and everything in any order in which
    it can run.
    """
    placement = [
        *range(num_ranks),
        *(rng.randrange(num_ranks) for _ in range(num_ranks, num_stages)),
    ]
    rng.shuffle(placement)
    todo: dict[str, list[str]] = {}
    gradient: dict[tuple[int, int], str] = {}
    for stage in reversed(range(num_stages)):
        for i in range(m):
            parts = "B" if rng.random() < 0.5 else "IW"
            gradient[stage, i] = f"{stage}{parts[0]}{i}"
            todo[f"{stage}F{i}"] = [f"{stage - 1}F{i}"] if stage else []
            later = [gradient[stage + 1, i]] if stage + 1 < num_stages else []
            todo[gradient[stage, i]] = [f"{stage}F{i}", *later]
            if parts == "IW":
                todo[f"{stage}W{i}"] = [f"{stage}I{i}"]
    lists: list[list[str]] = [[] for _ in range(num_ranks)]
    while todo:
        ready = [action for action, needed in todo.items() if not any(n in todo for n in needed)]
        action = rng.choice(ready)
        del todo[action]
        lists[placement[Oracle.split(action)[0]]].append(action)
    return lists
