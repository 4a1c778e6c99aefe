from collections.abc import Sequence
from typing import Any, final

__all__ = ["Communicator", "HostWork", "SymmetricMemory", "create_segment", "kernel_isa"]

def create_segment(size: int) -> int: ...
def kernel_isa() -> str: ...

@final
class SymmetricMemory:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class HostWork:
    def __init__(self) -> None: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def is_completed(self) -> bool: ...
    def result(self, timeout: float | None = None) -> Any: ...

@final
class Communicator:
    timeout: float
    def __init__(self) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    @staticmethod
    def create_group(
        world_size: int, num_cores: int, timeout: float, arrays: Any
    ) -> list[Communicator]: ...
    @staticmethod
    def connect(
        rank: int,
        world_size: int,
        hosts: Sequence[Sequence[int]],
        segment_fd: int,
        collective_sockets: Sequence[int],
        message_sockets: Sequence[int],
        num_cores: int,
        timeout: float,
        arrays: Any,
    ) -> Communicator: ...
    def close(self) -> None: ...
    def allocate(self, nbytes: int) -> SymmetricMemory | None: ...
    def allreduce(
        self, x: Any, out: Any, reduce_op: int, async_op: bool, timeout: float | None, tag: int
    ) -> Any: ...
    def broadcast(
        self, x: Any, out: Any, root: int, async_op: bool, timeout: float | None, tag: int
    ) -> Any: ...
    def reduce(
        self,
        x: Any,
        out: Any,
        reduce_op: int,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Any: ...
    def all_gather(
        self, x: Any, out: Any, async_op: bool, timeout: float | None, tag: int
    ) -> Any: ...
    def reduce_scatter(
        self, x: Any, out: Any, reduce_op: int, async_op: bool, timeout: float | None, tag: int
    ) -> Any: ...
    def all_to_all(
        self,
        x: Any,
        out: Any,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Any: ...
    def gather(
        self, x: Any, out: Any, root: int, async_op: bool, timeout: float | None, tag: int
    ) -> Any: ...
    def scatter(
        self, x: Any, out: Any, root: int, async_op: bool, timeout: float | None, tag: int
    ) -> Any: ...
    def barrier(self, async_op: bool, timeout: float | None, tag: int) -> Any: ...
    def send(self, x: Any, dst: int, async_op: bool, timeout: float | None, tag: int) -> Any: ...
    def recv(self, out: Any, src: int, async_op: bool, timeout: float | None, tag: int) -> Any: ...
    def sendrecv(
        self,
        x: Any,
        out: Any,
        dst: int,
        src: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Any: ...
    def batch(self, ops: Sequence[Any], async_op: bool, timeout: float | None, tag: int) -> Any: ...
