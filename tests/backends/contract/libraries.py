"""Arrays of other libraries go in, and come out as what they were."""

from __future__ import annotations

import array
from typing import Any

import ml_dtypes
import numpy as np
from backends.contract.case import Group, case, raised
from backends.contract.reference import COLLECTIVES, call, expected, inputs
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist import InvalidArray


@case()
def buffers_are_arrays(group: Group) -> None:
    size = group.world_size
    for x in (
        bytearray([group.rank] * 5),
        bytes([group.rank] * 5),
        memoryview(bytearray([group.rank] * 5)),
        array.array("B", [group.rank] * 5),
    ):
        y = fd.all_gather(x, group)
        assert type(y) is np.ndarray
        assert_array_equal(y, np.repeat(np.arange(size), 5))
    doubles = array.array("d", [1.0, 2.0])
    assert fd.allreduce(doubles, group, out=doubles) is doubles
    assert doubles.tolist() == [size, 2.0 * size]
    written = bytearray(5 * size)
    assert fd.all_gather(bytes([group.rank] * 5), group, out=written) is written
    assert written == bytes(rank for rank in range(size) for _ in range(5))


@case()
def numpy_scalars_and_subclasses_are_arrays(group: Group) -> None:
    y = fd.allreduce(np.float32(2), group)
    assert (y.shape, y.dtype) == ((), np.dtype(np.float32))
    assert y == 2 * group.world_size
    z = fd.allreduce(np.ones((2, 2)).view(np.matrix), group)
    assert type(z) is np.ndarray
    assert (z == group.world_size).all()


@case()
def inputs_of_any_layout_are_read(group: Group) -> None:
    base = np.arange(24.0).reshape(2, 3, 4) + group.rank
    total = sum(np.arange(24.0).reshape(2, 3, 4) + rank for rank in range(group.world_size))
    views: list[Any] = [
        lambda x: x.T,
        lambda x: x[::-1],
        lambda x: x[:, ::2, 1:3],
        lambda x: np.broadcast_to(x[:1], (2, 3, 4)),
        lambda x: np.asfortranarray(x),
    ]
    for view in views:
        y = fd.allreduce(view(base), group)
        assert y.flags.c_contiguous
        assert_array_equal(y, view(total))
    frozen = base.copy()
    frozen.flags.writeable = False
    assert_array_equal(fd.allreduce(frozen, group), total)
    # An address that is no multiple of the item size.
    shifted = np.frombuffer(bytearray(1 + 8 * 24), np.uint8)[1:].view(np.float64)
    shifted[:] = base.ravel()
    assert_array_equal(fd.allreduce(shifted, group), np.asarray(total).ravel())
    fd.allreduce(shifted, group, out=shifted)
    assert_array_equal(shifted, np.asarray(total).ravel())


@case()
def ml_dtypes_are_dtypes(group: Group) -> None:
    x = np.ones(300, ml_dtypes.bfloat16)
    y = fd.allreduce(x, group)
    assert y.dtype == x.dtype
    assert (y.astype(float) == group.world_size).all()
    z = fd.all_gather(np.ones(3, ml_dtypes.float8_e4m3fn), group)
    assert z.dtype == ml_dtypes.float8_e4m3fn


@case(each=COLLECTIVES, library="torch")
def returns_torch_tensors(group: Group, op: str) -> None:
    import torch

    names = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
    for dtype in names:
        arrays = inputs(op, group, (3, 2), "float32")
        wanted = expected(op, arrays, group.rank)
        x = torch.from_numpy(arrays[group.rank]).to(dtype)
        if op == "scatter":
            out = torch.empty((3, 2), dtype=dtype)
            y = fd.scatter(x if group.rank == 0 else None, group, out=out)
            assert y is out
        else:
            y = call(op, group, x)
        assert (y is None) == (wanted is None)
        if y is None:
            continue
        assert isinstance(y, torch.Tensor)
        assert (y.dtype, tuple(y.shape), y.requires_grad) == (dtype, wanted.shape, False)
        assert_array_equal(y.to(torch.complex64).numpy(), wanted)


@case(library="torch")
def torch_tensors_are_written_in_place(group: Group) -> None:
    import torch

    x = torch.full((4, 5), float(group.rank))
    assert fd.allreduce(x, group, out=x) is x
    assert (x == sum(range(group.world_size))).all()
    shared = torch.from_numpy(fd.empty((4, 5), "float32", group))
    shared.fill_(1)
    assert fd.allreduce(shared, group, out=shared, async_op=True).result() is shared
    assert (shared == group.world_size).all()
    y = fd.allreduce(x.t(), group, "max")
    assert y.shape == (5, 4)
    if group.rank == 0:
        raised(InvalidArray, fd.allreduce, x, group, out=torch.empty(5, 4).t())
        raised(InvalidArray, fd.allreduce, x, group, out=torch.empty(4, 5, requires_grad=True))
        raised(InvalidArray, fd.allreduce, torch.empty(4, 5, device="meta"), group)
        raised(InvalidArray, fd.allreduce, torch.ones(3).to_sparse(), group)
    fd.barrier(group)


@case(library="torch")
def torch_views_memory_of_bfloat16(group: Group) -> None:
    import torch

    array = fd.empty((4, 5), "bfloat16", group)
    x = torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    x.fill_(group.rank + 1)
    assert fd.allreduce(x, group, out=x) is x
    assert (array == group.world_size * (group.world_size + 1) / 2).all()


@case(each=COLLECTIVES, library="jax")
def returns_jax_arrays(group: Group, op: str) -> None:
    import jax
    import jax.numpy as jnp

    arrays = inputs(op, group, (3, 2), "float32")
    wanted = expected(op, arrays, group.rank)
    x = jnp.asarray(arrays[group.rank])
    y = call(op, group, x)
    assert (y is None) == (wanted is None)
    if y is not None:
        if op != "scatter" or group.rank == 0:  # elsewhere the output given is NumPy's
            assert isinstance(y, jax.Array)
        assert_array_equal(y, wanted)
    assert_array_equal(x, arrays[group.rank])


@case(library="jax")
def jax_arrays_are_not_written(group: Group) -> None:
    import jax.numpy as jnp

    x = jnp.ones(5, jnp.bfloat16)
    if group.rank == 0:
        raised(InvalidArray, fd.allreduce, x, group, out=x)
    y = fd.allreduce(x, group, async_op=True).result()
    assert y.dtype == jnp.bfloat16
    assert (y == group.world_size).all()
