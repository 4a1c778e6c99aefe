from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, final

from ferro_dist._native.nccl_connection import Connection
from ferro_dist._native.nccl_library import UniqueId, get_last_error, get_unique_id, get_version
from ferro_dist._native.nccl_operation import dtype_to_nccl, reduce_op_to_nccl
from ferro_dist._native.nccl_resource import PreMulSum, Registration, Window

__all__ = [
    "Communicator",
    "Group",
    "UniqueId",
    "dtype_to_nccl",
    "get_last_error",
    "get_unique_id",
    "get_version",
    "reduce_op_to_nccl",
]

@final
class Communicator(Connection):
    def __init__(self, /, *args: Any, **kwargs: Any) -> None: ...
    @staticmethod
    def init_rank(
        world_size: int,
        unique_ids: UniqueId | Sequence[UniqueId],
        rank: int,
        *,
        device: int | None = None,
        timeout: float = 300.0,
        alarm: object = None,
        **config: Any,
    ) -> Communicator: ...
    @staticmethod
    def join(
        world_size: int,
        unique_id: UniqueId,
        rank: int,
        *,
        device: int | None = None,
        timeout: float = 300.0,
        **config: Any,
    ) -> Communicator: ...
    def split(
        self, color: int | None, key: int, *, timeout: float | None = None, **config: Any
    ) -> Communicator | None: ...
    def shrink(
        self,
        excluded: Iterable[int],
        *,
        abort: bool = False,
        timeout: float | None = None,
        **config: Any,
    ) -> Communicator: ...
    def grow(
        self,
        world_size: int,
        unique_id: UniqueId | None = None,
        *,
        timeout: float | None = None,
        **config: Any,
    ) -> Communicator: ...
    def unique_id(self, *, timeout: float | None = None) -> UniqueId: ...
    def allreduce_raw(
        self, sendbuf: int, recvbuf: int, count: int, dtype: int, op: int, stream: Any
    ) -> None: ...
    def broadcast_raw(
        self, sendbuf: int, recvbuf: int, count: int, dtype: int, root: int, stream: Any
    ) -> None: ...
    def reduce_raw(
        self, sendbuf: int, recvbuf: int, count: int, dtype: int, op: int, root: int, stream: Any
    ) -> None: ...
    def all_gather_raw(
        self, sendbuf: int, recvbuf: int, sendcount: int, dtype: int, stream: Any
    ) -> None: ...
    def reduce_scatter_raw(
        self, sendbuf: int, recvbuf: int, recvcount: int, dtype: int, op: int, stream: Any
    ) -> None: ...
    def all_to_all_raw(
        self, sendbuf: int, recvbuf: int, count: int, dtype: int, stream: Any
    ) -> None: ...
    def gather_raw(
        self, sendbuf: int, recvbuf: int, count: int, dtype: int, root: int, stream: Any
    ) -> None: ...
    def scatter_raw(
        self, sendbuf: int, recvbuf: int, count: int, dtype: int, root: int, stream: Any
    ) -> None: ...
    def send_raw(self, sendbuf: int, count: int, dtype: int, peer: int, stream: Any) -> None: ...
    def recv_raw(self, recvbuf: int, count: int, dtype: int, peer: int, stream: Any) -> None: ...
    def allreduce(self, x: Any, out: Any, op: Any = ..., *, stream: Any = None) -> None: ...
    def allreduce_coalesced(
        self, xs: Sequence[Any], outs: Sequence[Any], op: Any = ..., *, stream: Any = None
    ) -> None: ...
    def broadcast(self, x: Any, out: Any, root: int, *, stream: Any = None) -> None: ...
    def reduce(self, x: Any, out: Any, root: int, op: Any = ..., *, stream: Any = None) -> None: ...
    def all_gather(self, x: Any, out: Any, *, stream: Any = None) -> None: ...
    def reduce_scatter(self, x: Any, out: Any, op: Any = ..., *, stream: Any = None) -> None: ...
    def all_to_all(self, x: Any, out: Any, *, stream: Any = None) -> None: ...
    def gather(self, x: Any, out: Any, root: int, *, stream: Any = None) -> None: ...
    def scatter(self, x: Any, out: Any, root: int, *, stream: Any = None) -> None: ...
    def send(self, x: Any, peer: int, *, stream: Any = None) -> None: ...
    def recv(self, out: Any, peer: int, *, stream: Any = None) -> None: ...
    def put(
        self,
        x: Any,
        peer: int,
        window: Window,
        offset: int = 0,
        *,
        signal: int = 0,
        context: int = 0,
        stream: Any = None,
    ) -> None: ...
    def signal(self, peer: int, *, signal: int = 0, context: int = 0, stream: Any) -> None: ...
    def wait_signal(
        self, peer: int, count: int = 1, *, signal: int = 0, context: int = 0, stream: Any
    ) -> None: ...
    def premul_sum(
        self, scalar: float, dtype: str, *, timeout: float | None = None
    ) -> PreMulSum: ...
    def register(self, x: Any, *, timeout: float | None = None) -> Registration: ...
    def register_window(
        self, x: Any, *, symmetric: bool = True, timeout: float | None = None
    ) -> Window: ...

@final
class Group:
    def __enter__(self) -> Group: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
