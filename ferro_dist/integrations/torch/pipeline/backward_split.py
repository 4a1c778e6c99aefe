"""A torch backward in two parts: first the input's gradients, later the weights'.

Autograd's graph of one microbatch, from the outputs down to the leaves:

    output ── mul ── addmm ── gelu ── addmm ── input
                      │ └ t ─ weight  │ └ t ─ weight
                     bias            bias

The *spine* is all nodes from which an input can be reached. A *junction* is a node of the
spine from which a weight is reached without going along the spine: both addmm. In steps:

1. Walk the graph; find spine, junctions, and the weights of each junction.
2. Input part: backward with only the inputs as its goals. Each node computes only what leads
   there: one of addmm's two matrix products. A hook on each junction keeps the gradient that
   passes through it.
3. Weight part, any time later: for each junction, backward from it with what was kept, with only
   its weights as goals. The spine below is not run again, as it leads to none of them.

Each product is computed once, and weights accumulate through autograd, so their hooks fire. Hooks
of the tensor that a junction has made fire in both parts. In the second they get zeros, as
``retain_grad`` adds up what it is given, and what they return is replaced by what was kept.

Some weights cannot wait, and are goals of the input part already:

- A weight of several junctions, such as that of a layer that is used twice: from the upper junction
  the spine leads to it again, and its share would count twice.
- A weight of a Python function (`torch.autograd.Function`), whose backward computes
  everything each time it is called; it would run twice.

Cost: for each microbatch a walk over the graph, a microsecond per node, and an autograd call for
each junction.

References
----------
P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

__all__ = ["WeightPart", "run_input_part"]

Node = Any
Tensor = Any

UNDIVIDED = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""A re-entrant checkpoint refuses to run with goals, and what torch.compile has made refuses to
keep what it has saved. A graph with one of them runs undivided."""


_LEAF = "torch::autograd::AccumulateGrad"


class WeightPart:
    """What is left of a backward once the gradients of its inputs are there."""

    def __init__(self, junctions: Sequence[_Junction] = ()) -> None:
        self._junctions = list(junctions)

    def run(self) -> None:
        """Accumulate the weights' gradients."""
        while self._junctions:
            self._junctions.pop().run()  # release each, with what it has kept


class _WholeBackward(WeightPart):
    """A whole backward, if no input needs a gradient."""

    def __init__(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self._edges = edges
        self._gradients = gradients

    def run(self) -> None:
        torch.autograd.backward(self._edges, self._gradients)


def run_input_part(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tell: Callable[[str], None],
) -> WeightPart:
    """Accumulate the gradients of `inputs`, and of those weights that cannot wait.

    Parameters
    ----------
    edges, gradients : sequence
        The outputs, and the gradient of each.
    inputs : sequence of tensor
        Leaves of the graph.
    tell : function
        Called with the name of each Python function that keeps weights from waiting.
    """
    if not inputs:
        return _WholeBackward(edges, gradients)
    graph = _Graph([edge.node for edge in edges], inputs)
    if graph.undivided is not None:
        tell(graph.undivided)
        torch.autograd.backward(edges, gradients)
        return WeightPart()
    waiting, urgent = graph.divide(tell)
    junctions = [_Junction(node, weights) for node, weights in waiting.items()]
    del graph
    torch.autograd.backward(edges, gradients, inputs=[*inputs, *urgent], retain_graph=True)
    return WeightPart([junction for junction in junctions if junction.has_gradient])


class _Junction:
    """A node, its weights, and the gradient that passed through it."""

    def __init__(self, node: Node, weights: list[Tensor]) -> None:
        self._node = node
        self._weights = weights
        self._kept: tuple[Tensor | None, ...] | None = None
        self._hook = node.register_prehook(self._keep_or_give)

    @property
    def has_gradient(self) -> bool:
        return self._kept is not None and any(g is not None for g in self._kept)

    def run(self) -> None:
        kept = self._kept or ()
        present = [i for i, gradient in enumerate(kept) if gradient is not None]
        torch.autograd.backward(
            [GradientEdge(self._node, i) for i in present],
            [torch.zeros_like(kept[i]) for i in present],
            inputs=self._weights,
        )
        self._hook.remove()

    def _keep_or_give(
        self, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        if self._kept is None:
            self._kept = gradients
            return None
        return self._kept


class _Graph:
    """The graph below some roots, walked once."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        self._parents: dict[Node, list[Node]] = {}
        self._leaves: list[Node] = []
        self.undivided: str | None = None
        self._walk(roots)
        wanted = {id(tensor) for tensor in inputs}
        of_inputs = [leaf for leaf in self._leaves if id(leaf.variable) in wanted]
        self._spine = self._above(of_inputs)
        self._weights = [leaf for leaf in self._leaves if leaf not in self._spine]
        self._roots = set(roots)

    def divide(self, tell: Callable[[str], None]) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
        """Return the weights that can wait, by their junctions, and those that cannot."""
        junctions, functions = self._reach()
        urgent = {leaf for leaf, nodes in junctions.items() if len(nodes) > 1}
        for leaf, nodes in junctions.items():
            for node in nodes:
                if isinstance(node, BackwardCFunction) or node not in self._spine:
                    urgent.add(leaf)
                if isinstance(node, BackwardCFunction) and node in self._spine:
                    tell(_name(node))
        _spread(urgent, functions)
        waiting: dict[Node, list[Tensor]] = defaultdict(list)
        for leaf, nodes in junctions.items():
            if leaf not in urgent:
                waiting[nodes.pop()].append(leaf.variable)
        return waiting, [leaf.variable for leaf in urgent]

    def _reach(self) -> tuple[dict[Node, set[Node]], dict[Node, set[Node]]]:
        """Find what is above each weight: junctions, and Python functions on the way there."""
        junctions: dict[Node, set[Node]] = {}
        functions: dict[Node, set[Node]] = defaultdict(set)
        for leaf in self._weights:
            found: set[Node] = set()
            seen = {leaf}
            to_do = [leaf]
            while to_do:
                node = to_do.pop()
                if node in self._spine:
                    found.add(node)
                    continue
                if node in self._roots:
                    found.add(node)
                if isinstance(node, BackwardCFunction):
                    functions[node].add(leaf)
                for parent in self._parents[node]:
                    if parent not in seen:
                        seen.add(parent)
                        to_do.append(parent)
            junctions[leaf] = found
        return junctions, functions

    def _walk(self, roots: Sequence[Node]) -> None:
        to_do = []
        for root in roots:
            if root not in self._parents:
                self._parents[root] = []
                to_do.append(root)
        while to_do:
            node = to_do.pop()
            name = _name(node)
            if name == _LEAF:
                self._leaves.append(node)
            elif name in UNDIVIDED:
                self.undivided = name
            for child, _ in node.next_functions:
                if child is None:
                    continue
                if child not in self._parents:
                    self._parents[child] = []
                    to_do.append(child)
                self._parents[child].append(node)

    def _above(self, leaves: Iterable[Node]) -> set[Node]:
        above = set(leaves)
        to_do = list(above)
        while to_do:
            for parent in self._parents[to_do.pop()]:
                if parent not in above:
                    above.add(parent)
                    to_do.append(parent)
        return above


def _name(node: Node) -> str:
    # Not its own method: the context of a Python function may have an attribute called that.
    name: str = type(node).name(node)
    return name


def _spread(urgent: set[Node], functions: dict[Node, set[Node]]) -> None:
    """Let no Python function run for a waiting weight if it runs for one that cannot wait."""
    has_grown = True
    while has_grown:
        has_grown = False
        for weights in functions.values():
            if weights & urgent and not weights <= urgent:
                urgent |= weights
                has_grown = True
