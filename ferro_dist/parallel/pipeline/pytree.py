"""Trees of arrays: what travels between the stages of a pipeline.

A tree is an array, None, a bool, int, float or str, or a tuple, list or dict of trees. Flattened,
it is its arrays and a structure: nested tuples that hold everything else, can be hashed, compared
and written as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "ARRAY",
    "Structure",
    "flatten",
    "from_lists",
    "gradients_like",
    "is_array",
    "unflatten",
]

Array = Any
Tree = Any
Structure = tuple[Any, ...]
"""One of: ("array",), ("tuple" or "list", *children), ("dict", keys, *children),
("none",), ("bool" or "int" or "str", value), ("float", its hexadecimal text)."""

ARRAY: Structure = ("array",)
"""The structure of a tree that is one array."""

_NONE: Structure = ("none",)
_SEQUENCES = {"tuple": tuple, "list": list}


def is_array(value: object) -> bool:
    """Whether this is a leaf that holds data: an array of any library."""
    return _has(value, "shape") and _has(value, "dtype")


def flatten(tree: Tree) -> tuple[Structure, list[Array]]:
    """Return the structure of a tree and its arrays, in order.

    Raises
    ------
    TypeError
        Something in it is none of these. Subclasses of tuple and dict are refused, too: the other
        side would turn them into the plain type.
    """
    arrays: list[Array] = []
    return _flatten(tree, arrays), arrays


def unflatten(structure: Structure, arrays: Sequence[Array]) -> Tree:
    """Return the tree of this structure that holds these arrays."""
    if structure is ARRAY:  # most of them are
        return arrays[0]
    return _unflatten(structure, iter(arrays))


def gradients_like(
    structure: Structure, shapes: Sequence[Sequence[int]], gradient: Tree, giver: str, of: str
) -> list[Array | None]:
    """Return one gradient for each array of a structure, from a tree of gradients like it.

    None in the tree, or a missing key of a dict, stands for no gradient, for an array or for all
    below it. What is in the place of a constant is ignored.

    Parameters
    ----------
    structure : Structure
    shapes : sequence of shapes
        Of its arrays.
    gradient : tree
    giver, of : str
        For errors: ``"backward returned"``, ``"input"``.

    Raises
    ------
    TypeError, ValueError
        The gradient does not match the structure or the shapes.
    """
    leaves = _leaves_like(structure, gradient)
    for leaf, shape in zip(leaves, shapes, strict=True):
        if leaf is None:
            continue
        if not is_array(leaf):
            raise TypeError(
                f"Pipeline: {giver} a {type(leaf).__qualname__} where the gradient of an {of} is "
                "due: an array of its shape, or None"
            )
        # A column in place of a matrix would be broadcast by the previous stage, unnoticed.
        if tuple(leaf.shape) != tuple(shape):
            raise ValueError(
                f"Pipeline: {giver} a gradient of shape {tuple(leaf.shape)} for an {of} of shape "
                f"{tuple(shape)}"
            )
    return leaves


def _leaves_like(structure: Structure, gradient: Tree) -> list[Array | None]:
    kind = structure[0]
    if kind == "array":
        return [gradient]
    if kind not in (*_SEQUENCES, "dict"):
        return []
    children = structure[2:] if kind == "dict" else structure[1:]
    if gradient is None:
        parts: Sequence[Tree] = [None] * len(children)
    elif kind == "dict":
        _check_type(gradient, (dict,), kind)
        keys = [_value(key) for key in structure[1]]
        _check_keys(gradient, keys)
        parts = [gradient.get(key) for key in keys]
    else:
        _check_type(gradient, (tuple, list), kind)
        parts = gradient
    if len(parts) != len(children):
        raise ValueError(
            f"Pipeline: there are {len(parts)} gradients for a {kind} of {len(children)}"
        )
    pairs = zip(children, parts, strict=True)
    return [leaf for child, part in pairs for leaf in _leaves_like(child, part)]


def _check_type(gradient: Tree, types: tuple[type, ...], kind: str) -> None:
    """Raise TypeError for an array in place of a tuple: its rows would pass for the elements."""
    if not isinstance(gradient, types):
        raise TypeError(
            f"Pipeline: there is a gradient of type {type(gradient).__qualname__} for a {kind}: "
            f"give a {kind} of gradients"
        )


def _check_keys(gradient: Tree, keys: Sequence[Any]) -> None:
    """Raise ValueError for a gradient with an unknown key: a misspelt one would be lost."""
    unknown = [key for key in gradient if key not in keys]
    if unknown:
        raise ValueError(f"Pipeline: there are gradients of {unknown} for a dict of {keys}")


def from_lists(lists: list[Any]) -> Structure:
    """Return a structure that has been written as JSON, which has no tuples, and read again."""
    structure: Structure = _tupled(lists)
    return ARRAY if structure == ARRAY else structure


def _has(value: object, name: str) -> bool:
    # By the type first: torch's nested tensors have a shape that raises when it is asked for.
    return hasattr(type(value), name) or hasattr(value, name)


def _flatten(tree: Tree, arrays: list[Array]) -> Structure:
    if is_array(tree):
        arrays.append(tree)
        return ARRAY
    # Exact types: True is an int too, and a namedtuple a tuple.
    kind = type(tree)
    if tree is None:
        return _NONE
    if kind is tuple or kind is list:
        return (kind.__name__, *(_flatten(child, arrays) for child in tree))
    if kind is dict:
        keys = tuple(map(_key, tree))
        return ("dict", keys, *(_flatten(child, arrays) for child in tree.values()))
    return _constant(tree)


def _key(key: object) -> Structure:
    if isinstance(key, (bool, int, float, str)):
        return _constant(key)
    raise TypeError(
        "Pipeline: what travels between stages may hold a dict with keys that are bool, int, float "
        f"or str, not {key!r}"
    )


def _constant(value: object) -> Structure:
    """Name the type with the value: structures are compared, and 1 == True == 1.0."""
    kind = type(value)
    if kind is bool or kind is int or kind is str:
        return (kind.__name__, value)
    if isinstance(value, float) and kind is float:
        return ("float", value.hex())
    plain = next(
        (base for base in (tuple, list, dict, bool, int, float, str) if isinstance(value, base)),
        dict if isinstance(value, Mapping) else None,
    )
    remedy = (
        ""
        if plain is None
        else f": the stage after it would get a plain {plain.__name__}, so make one of it"
    )
    raise TypeError(
        "Pipeline: what travels between stages is made of arrays, None, bool, int, float, str, "
        f"tuple, list and dict, not {kind.__module__}.{kind.__qualname__}{remedy}"
    )


def _unflatten(structure: Structure, arrays: Iterator[Array]) -> Tree:
    kind = structure[0]
    if kind == "array":
        return next(arrays)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_unflatten(child, arrays) for child in structure[1:])
    if kind == "dict":
        keys = (_value(key) for key in structure[1])
        return {k: _unflatten(c, arrays) for k, c in zip(keys, structure[2:], strict=True)}
    return _value(structure)


def _value(constant: Structure) -> object:
    if constant[0] == "none":
        return None
    return float.fromhex(constant[1]) if constant[0] == "float" else constant[1]


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
