"""How gradients leave a compiled JAX program while backward still runs.

`tap_leaves` is the identity. Its backward hands each group of gradients to the host as
soon as it is computed, and returns what the host makes of all of them:

    params ──► gate ──► announce, one for each group ──► loss
                 ◄───── ready(group, gradients) ◄─────── backward
           finish()

Each announcement passes a token to the gate. The tokens tell XLA only that the gate comes after all
announcements, which it may run in any order and in parallel. So the host must not let one wait for
another rank; only `finish` may. JAX's ordered callbacks would be one chain through the whole
program, and are refused inside custom gradients.

Where nothing is compiled the same functions are called at once: JAX would make and compile a
program for each callback, in every step anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from ferro_dist.integrations.jax.leaves import delivered, is_traced

__all__ = ["tap_leaves"]

JaxArray = Any
NumpyArray = np.ndarray[Any, Any]

Ready = Callable[[int, list[NumpyArray]], None]
Finish = Callable[[], Sequence[NumpyArray]]


def tap_leaves(
    leaves: Sequence[JaxArray], groups: Sequence[Sequence[int]], ready: Ready, finish: Finish
) -> list[JaxArray]:
    """Return `leaves` unchanged; in backward, let the host replace their gradients.

    Works inside ``jax.jit``, ``jax.checkpoint`` and ``lax.scan``, and without any of them.

    Parameters
    ----------
    leaves : sequence of jax.Array
        Real or complex floats.
    groups : sequence of sequence of int
        Which leaves are announced together; each leaf is in one group.
    ready : callable
        Called with the number of a group and its gradients, in any order and from any
        thread. Must not wait for other ranks. Groups on which the loss does not depend are
        not announced.
    finish : callable
        Called once all groups that will be announced have been; returns one gradient for each leaf.
        They are copied at once.
    """
    tapped: list[JaxArray]
    tapped, tokens = _gate(len(groups), finish)([jnp.asarray(leaf) for leaf in leaves])
    for number, group in enumerate(groups):
        through = _announcement(number, ready)([tapped[i] for i in group], tokens[number])
        for i, leaf in zip(group, through, strict=True):
            tapped[i] = leaf
    return tapped


def _gate(num_groups: int, finish: Finish) -> Callable[[list[JaxArray]], Any]:
    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def gate(leaves: list[JaxArray]) -> tuple[list[JaxArray], list[JaxArray]]:
        return leaves, [jnp.zeros((), jnp.float32)] * num_groups

    def forward(leaves: list[JaxArray]) -> tuple[Any, None]:
        return gate(leaves), None

    def backward(_: None, cotangents: Any) -> tuple[list[JaxArray]]:
        gradients, tokens = cotangents
        if not _is_in_program(tokens):
            return (delivered(gradients, finish()),)
        results = [jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients]
        # One more than is returned: JAX 0.6.2, the last for Python 3.10, aborts when it compiles
        # certain products of matrices in a program that returns just what a callback does.
        returned = io_callback(
            lambda *_: [*finish(), np.float32(0)],
            [*results, jax.ShapeDtypeStruct((), jnp.float32)],
            *tokens,
        )
        return (returned[:-1],)

    gate.defvjp(forward, backward)
    return gate  # type: ignore[no-any-return]


def _announcement(number: int, ready: Ready) -> Callable[[list[JaxArray], JaxArray], Any]:
    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def announcement(leaves: list[JaxArray], token: JaxArray) -> list[JaxArray]:
        return leaves

    def forward(leaves: list[JaxArray], token: JaxArray) -> tuple[Any, None]:
        return announcement(leaves, token), None

    def announce(*gradients: JaxArray) -> Any:
        ready(number, [np.asarray(gradient) for gradient in gradients])
        return np.float32(0)

    def backward(_: None, gradients: list[JaxArray]) -> tuple[list[JaxArray], JaxArray]:
        if not _is_in_program(gradients):
            return gradients, jnp.asarray(announce(*gradients))
        token = io_callback(announce, jax.ShapeDtypeStruct((), jnp.float32), *gradients)
        return gradients, token

    announcement.defvjp(forward, backward)
    return announcement  # type: ignore[no-any-return]


def _is_in_program(values: Sequence[JaxArray]) -> bool:
    """Whether a program is being made, in which some values may be known already."""
    return is_traced([jnp.zeros(()), *values])
