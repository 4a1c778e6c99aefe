"""One rank of one system: waits for orders on a socket, and times what it is told to.

Started by the system's own launcher. While it has no order it sleeps in a read, so that
the one system under measurement has the cores for itself.
"""

from __future__ import annotations

import abc
import json
import mmap
import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import measure

_CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    adapter_class = ADAPTERS[os.environ["BENCHMARK_ADAPTER"]]
    adapter = adapter_class()
    # Threads made by the adapter inherit what the rank was given.
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["BENCHMARK_SOCKET"])
        obey(adapter, connection)


def obey(adapter: Adapter, connection: socket.socket) -> None:
    """Answer each line of orders with a line of JSON, until the parent hangs up."""
    orders = connection.makefile("r", encoding="utf-8")
    name = os.environ["BENCHMARK_NAME"]
    send_line(connection, {"name": name, "rank": adapter.rank, "about": adapter.about()})
    for line in orders:
        order = json.loads(line)
        if order["do"] == "exit":
            break
        send_line(connection, answer(adapter, order))
    adapter.close()


def send_line(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def answer(adapter: Adapter, order: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": adapter.obey(order)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


class Adapter(abc.ABC):
    """A system as the benchmark sees it."""

    def __init__(self) -> None:
        self.rank, self.world_size = self.connect()

    @abc.abstractmethod
    def connect(self) -> tuple[int, int]:
        """Bind to this rank's core, join the group; rank and world size."""

    @abc.abstractmethod
    def about(self) -> str:
        """Version of the system, as it says itself."""

    @abc.abstractmethod
    def obey(self, order: dict[str, Any]) -> Any:
        """Carry out one order."""

    def close(self) -> None:  # noqa: B027 (most leave by ending)
        """Leave the group."""


def bind(rank: int) -> None:
    """Give each rank a core of its own, as far as there are enough."""
    if "BENCHMARK_UNBOUND" in os.environ:
        return
    os.sched_setaffinity(0, {_CORES[rank % len(_CORES)]})


class Prepared(NamedTuple):
    """A case ready to be timed."""

    x: Any
    y: Any
    loop: Any
    barrier: Any


class CollectiveAdapter(Adapter):
    """A system with collectives. A case is prepared, checked, then timed in many samples."""

    barrier: str
    """The statement that all ranks pass together."""

    def __init__(self) -> None:
        super().__init__()
        self._prepared: dict[str, Prepared] = {}

    def obey(self, order: dict[str, Any]) -> Any:
        import cases

        if order["do"] == "release":
            self._prepared.clear()
            return None
        if order["do"] == "prepare":
            case = cases.Case(**order["case"])
            self._prepared[case.memory] = self._prepare(case)
            return None
        with measure.GarbageCollectorOff():
            prepared = self._prepared[order["memory"]]
            if order["is_fresh"]:
                return self._sample_fresh(prepared, order["samples"])
            return self._sample(prepared, order["samples"], order["times"])

    def _prepare(self, case: Any) -> Prepared:
        statement = self.statement(case)
        names = {**self.names(), "x": self.array(case, case.input_count)}
        names["y"] = self.array(case, case.output_count) if case.output_count else names["x"]
        names.update(self.describe_arrays(case, names["x"], names["y"]))
        prepared = Prepared(
            names["x"],
            names["y"],
            measure.compile_loop(statement, names),
            measure.compile_loop(self.barrier, names),
        )
        if case.collective != "barrier":
            self._check(case, prepared)
        return prepared

    def _check(self, case: Any, prepared: Prepared) -> None:
        expected = case.expected_on(self.rank)
        self.fill(prepared.y, expected * 0)  # what was there before is no result
        self.fill(prepared.x, case.input_of(self.rank))
        prepared.barrier((None,))
        prepared.loop((None,))
        is_right = (self.to_numpy(prepared.y) == expected).all()
        # Zeros stay zeros however often they are summed in place. They are written, since
        # untouched pages would all be the kernel's one page of zeros.
        self.fill(prepared.x, case.input_of(self.rank) * 0)
        self.fill(prepared.y, expected * 0)
        prepared.barrier((None,))  # after a wrong result, too: the others are there
        if not is_right:
            raise AssertionError(f"{case.collective} of {case.nbytes} bytes gave a wrong result")

    def _sample(self, prepared: Prepared, samples: int, times: int) -> list[float]:
        durations = []
        measure.time_ns(prepared.loop, min(times, 10))
        for _ in range(samples):
            prepared.barrier((None,))
            durations.append(measure.time_ns(prepared.loop, times) / times)
        return durations

    def _sample_fresh(self, prepared: Prepared, samples: int) -> list[float]:
        durations: list[float] = []
        for _ in range(samples + 1):
            prepared.x[...] *= 1
            prepared.barrier((None,))
            durations.append(measure.time_ns(prepared.loop, 1))
        return durations[1:]

    @abc.abstractmethod
    def names(self) -> dict[str, Any]:
        """Return what the statements call."""

    @abc.abstractmethod
    def statement(self, case: Any) -> str:
        """Write the collective as a user of the system would, in its fastest form."""

    @abc.abstractmethod
    def array(self, case: Any, count: int) -> Any:
        """Preallocated array of the case's dtype."""

    def describe_arrays(self, case: Any, x: Any, y: Any) -> dict[str, Any]:
        """More names for the statement, made from the arrays."""
        return {}

    def fill(self, array: Any, values: Any) -> None:
        array[...] = values

    def to_numpy(self, array: Any) -> Any:
        return array


def each_root(case: Any, statement: str) -> str:
    """Repeat a statement with every rank as {root} in turn."""
    return "; ".join(statement.format(root=root) for root in range(case.ranks))


def ping_pong(rank: int, world_size: int, send: str, recv: str) -> str:
    """Send a message to this rank's partner and get one back; an odd one out has none."""
    peer = rank ^ 1
    if peer >= world_size:
        return "pass"
    order = (send, recv) if rank < peer else (recv, send)
    return "; ".join(statement.format(peer=peer) for statement in order)


def both_ways(rank: int, world_size: int, *statements: str) -> str:
    """Exchange messages with this rank's partner; an odd one out has none."""
    peer = rank ^ 1
    return "; ".join(statements).format(peer=peer) if peer < world_size else "pass"


def numpy_dtype(name: str) -> Any:
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def page_aligned(count: int, dtype: Any) -> Any:
    """Make a NumPy array that begins on a page, as in the benchmarks of OSU.

    If the arrays of sender and receiver begin at different offsets in a cache line, the kernel
    copies up to 18 % more slowly. With malloc as it is tuned for MPI, chance decides where they
    begin.
    """
    import numpy as np

    nbytes = count * dtype.itemsize
    room = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    return room[start : start + nbytes].view(dtype)


class FerroDist(CollectiveAdapter):
    barrier = "barrier(backend)"

    def connect(self) -> tuple[int, int]:
        bind(int(os.environ["RANK"]))
        import ferro_dist as fd

        self.fd: Any = fd
        transport = os.environ["BENCHMARK_TRANSPORT"]
        self.backend = self.fd.init(backend={"gpu": "hybrid"}.get(transport, transport))
        return self.backend.rank, self.backend.world_size

    def about(self) -> str:
        return f"ferro_dist {self.fd.__version__}, {self.backend.name} backend"

    def names(self) -> dict[str, Any]:
        functions = (
            "allreduce broadcast all_gather reduce_scatter all_to_all send recv sendrecv barrier"
        )
        names = {name: getattr(self.fd, name) for name in functions.split()}
        return {**names, "backend": self.backend}

    def statement(self, case: Any) -> str:
        statements = {
            "allreduce": "allreduce(x, backend, out=x)",
            "iallreduce": "allreduce(x, backend, out=x, async_op=True).wait()",
            "broadcast": each_root(case, "broadcast(x, backend, {root}, out=x)"),
            "all_gather": "all_gather(x, backend, out=y)",
            "reduce_scatter": "reduce_scatter(x, backend, out=y)",
            "all_to_all": "all_to_all(x, backend, out=y)",
            "send_recv": ping_pong(
                self.rank, self.world_size, "send(x, backend, {peer})", "recv(y, backend, {peer})"
            ),
            "sendrecv": both_ways(
                self.rank, self.world_size, "sendrecv(x, y, backend, {peer}, {peer})"
            ),
            "isend_irecv": both_ways(
                self.rank,
                self.world_size,
                "received = recv(y, backend, {peer}, async_op=True)",
                "sent = send(x, backend, {peer}, async_op=True)",
                "received.wait()",
                "sent.wait()",
            ),
            "barrier": "barrier(backend)",
        }
        return statements[case.collective]

    def array(self, case: Any, count: int) -> Any:
        dtype = numpy_dtype(case.dtype)
        if case.memory == "symmetric":
            return self.fd.empty(count, dtype, self.backend)
        if case.memory == "torch":
            import torch

            return torch.empty(count, dtype=getattr(torch, case.dtype))
        return page_aligned(count, dtype)

    def fill(self, array: Any, values: Any) -> None:
        if hasattr(array, "copy_"):
            import torch

            array.copy_(torch.from_numpy(values))
        else:
            array[...] = values

    def to_numpy(self, array: Any) -> Any:
        return array.float().numpy() if hasattr(array, "copy_") else array

    def close(self) -> None:
        self.backend.close()


class Mpi(CollectiveAdapter):
    barrier = "comm.Barrier()"

    def connect(self) -> tuple[int, int]:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        bind(self._comm.rank)
        return self._comm.rank, self._comm.size

    def about(self) -> str:
        version: str = self._mpi.Get_library_version()
        return version.splitlines()[0].strip("\0").split(",")[0]

    def names(self) -> dict[str, Any]:
        functions = "Allreduce Iallreduce Bcast Allgather Reduce_scatter_block Alltoall Barrier"
        functions += " Send Isend Recv Irecv Sendrecv"
        names = {name: getattr(self._comm, name) for name in functions.split()}
        return {**names, "comm": self._comm, "IN_PLACE": self._mpi.IN_PLACE}

    def statement(self, case: Any) -> str:
        statements = {
            "allreduce": "Allreduce(IN_PLACE, sx)",
            "iallreduce": "Iallreduce(IN_PLACE, sx).Wait()",
            "broadcast": each_root(case, "Bcast(sx, {root})"),
            "all_gather": "Allgather(sx, sy)",
            "reduce_scatter": "Reduce_scatter_block(sx, sy)",
            "all_to_all": "Alltoall(sx, sy)",
            "send_recv": ping_pong(
                self.rank, self.world_size, "Send(sx, {peer})", "Recv(sy, {peer})"
            ),
            "sendrecv": both_ways(
                self.rank, self.world_size, "Sendrecv(sx, {peer}, 0, sy, {peer})"
            ),
            "isend_irecv": both_ways(
                self.rank,
                self.world_size,
                "received = Irecv(sy, {peer})",
                "sent = Isend(sx, {peer})",
                "received.Wait()",
                "sent.Wait()",
            ),
            "barrier": "Barrier()",
        }
        reductions = ("allreduce", "iallreduce", "reduce_scatter")
        if case.dtype.endswith("float16") and case.collective in reductions:
            raise NotImplementedError(f"MPI has no reduction of {case.dtype}")
        return statements[case.collective]

    def array(self, case: Any, count: int) -> Any:
        return page_aligned(count, numpy_dtype(case.dtype))

    def describe_arrays(self, case: Any, x: Any, y: Any) -> dict[str, Any]:
        # Buffer, count and type spelled out save mpi4py the reading of the array's format.
        types = {"float32": self._mpi.FLOAT, "float64": self._mpi.DOUBLE}
        mpi_type = types.get(case.dtype, self._mpi.UINT16_T)
        if case.dtype.endswith("float16"):
            x, y = x.view("u2"), y.view("u2")
        # Where a buffer holds one chunk for each rank, MPI counts one of them.
        count = case.chunk if case.is_split else case.total
        return {"sx": [x, count, mpi_type], "sy": [y, count, mpi_type]}


class Gloo(CollectiveAdapter):
    barrier = "barrier()"

    def connect(self) -> tuple[int, int]:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        bind(rank)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        store = f"file://{os.environ['BENCHMARK_DIRECTORY']}/{os.environ['BENCHMARK_ID']}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        return rank, world_size

    def about(self) -> str:
        return f"torch {self._torch.__version__}"

    def names(self) -> dict[str, Any]:
        functions = "all_reduce broadcast all_to_all_single send recv isend irecv barrier"
        names = {name: getattr(self._dist, name) for name in functions.split()}
        # Renamed in torch 2.13; the old names warn at every call.
        for new, old in (
            ("all_gather_single", "all_gather_into_tensor"),
            ("reduce_scatter_single", "reduce_scatter_tensor"),
        ):
            names[new] = getattr(self._dist, new, None) or getattr(self._dist, old)
        return names

    def statement(self, case: Any) -> str:
        exchange = both_ways(
            self.rank,
            self.world_size,
            "received = irecv(y, {peer})",
            "sent = isend(x, {peer})",
            "received.wait()",
            "sent.wait()",
        )
        statements = {
            "allreduce": "all_reduce(x)",
            "iallreduce": "all_reduce(x, async_op=True).wait()",
            "broadcast": each_root(case, "broadcast(x, {root})"),
            "all_gather": "all_gather_single(y, x)",
            "reduce_scatter": "reduce_scatter_single(y, x)",
            "all_to_all": "all_to_all_single(y, x)",
            "send_recv": ping_pong(
                self.rank, self.world_size, "send(x, {peer})", "recv(y, {peer})"
            ),
            "sendrecv": exchange,
            "isend_irecv": exchange,
            "barrier": "barrier()",
        }
        return statements[case.collective]

    def array(self, case: Any, count: int) -> Any:
        return self._torch.empty(count, dtype=getattr(self._torch, case.dtype))

    def fill(self, array: Any, values: Any) -> None:
        array.copy_(self._torch.from_numpy(values))

    def to_numpy(self, array: Any) -> Any:
        return array.float().numpy()

    def close(self) -> None:
        self._dist.destroy_process_group()


class Distance(Adapter):
    """Measures how far apart the first two cores are at the moment.

    Two processes hand a number to and fro in shared memory. On a virtual machine the
    answer changes from second to second, and with it every collective's time. The figure
    contains about 100 ns of the interpreter's own: it only tells near from far.
    """

    ROUND_TRIPS, REPEATS = 16, 6

    def connect(self) -> tuple[int, int]:
        rank = int(os.environ["RANK"])
        bind(rank)
        path = Path(os.environ["BENCHMARK_DIRECTORY"], "distance")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")
        os.close(descriptor)
        self._last = 0
        return rank, 2

    def about(self) -> str:
        return "cache-line round trip"

    def obey(self, order: dict[str, Any]) -> float:
        # The fastest of several: a timer interrupt can only add.
        return min(self._round_trip_ns() for _ in range(self.REPEATS))

    def _round_trip_ns(self) -> float:
        # 16 words apart: neighbouring cache lines are fetched in pairs.
        words, own, other = self._words, 16 * self.rank, 16 * (1 - self.rank)
        first, self._last = self._last + 1, self._last + self.ROUND_TRIPS + 1
        if self.rank == 0:
            words[own] = first
            self._await(other, first)
        else:
            self._await(other, first)
            words[own] = first
        started = time.perf_counter_ns()
        for number in range(first + 1, self._last + 1):
            if self.rank == 0:
                words[own] = number
                while words[other] != number:
                    pass
            else:
                while words[other] != number:
                    pass
                words[own] = number
        return (time.perf_counter_ns() - started) / self.ROUND_TRIPS

    def _await(self, index: int, number: int) -> None:
        deadline = time.monotonic() + 10
        while self._words[index] != number:
            if time.monotonic() > deadline:
                raise TimeoutError("the other process did not answer")


ADAPTERS: dict[str, type[Adapter]] = {
    "FerroDist": FerroDist,
    "Mpi": Mpi,
    "Gloo": Gloo,
    "Distance": Distance,
}


if __name__ == "__main__":
    main()
