"""The emulated NCCL and CUDA runtime, called as a C program calls them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ferro_dist.testing import emulated_gpu

DTYPES = {
    np.dtype(name): number
    for number, name in [
        (0, "int8"),
        (1, "uint8"),
        (2, "int32"),
        (3, "uint32"),
        (4, "int64"),
        (5, "uint64"),
        (6, "float16"),
        (7, "float32"),
        (8, "float64"),
        (9, ml_dtypes.bfloat16),
        (10, ml_dtypes.float8_e4m3fn),
        (11, ml_dtypes.float8_e5m2),
    ]
}
SUM, PROD, MAX, MIN, AVG = range(5)
SUCCESS, CUDA_ERROR, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS = range(
    8
)
# A pointer's width: C takes more of a stream than of a plain 0.
DEFAULT = ctypes.c_void_p()


UNDEFINED = -(2**31)

# 300 are enough on a machine that has nothing else to do.
DELAY_US = 10_000


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )

    @classmethod
    def of(cls, blocking: int) -> Config:
        # An old and short one: what lies behind is unset.
        return cls(cls.blocking.offset + 4, 0xCAFEBEEF, 23203, blocking)


class LongConfig(ctypes.Structure):
    """As of NCCL 2.18."""

    _fields_ = (
        *Config._fields_,
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )

    @classmethod
    def of(cls, **options: int) -> LongConfig:
        made = cls(
            cls.split_share.offset + 4, 0xCAFEBEEF, 23203, *(UNDEFINED,) * 4, None, UNDEFINED
        )
        for name, value in options.items():
            setattr(made, name, value)
        return made


class SignalDescriptor(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("count", "peer", "index", "context"))


class NcclError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Nccl:
    """Every function by its name without ``nccl``; a failure is raised."""

    def __init__(self) -> None:
        self.gpu = emulated_gpu()
        self.library = self.gpu.nccl
        self.library.ncclGetLastError.restype = ctypes.c_char_p

    def result(self, name: str, *args: Any) -> int:
        status: int = getattr(self.library, f"nccl{name}")(*map(_as_c, args))
        return status

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            status = self.result(name, *args)
            if status not in (SUCCESS, IN_PROGRESS):
                raise NcclError(status, self.library.ncclGetLastError(None).decode())
            return status

        return call

    def unique_id(self) -> UniqueId:
        made = UniqueId()
        self.GetUniqueId(ctypes.byref(made))
        return made

    def communicator(
        self, world_size: int, unique_id: bytes, rank: int, blocking: int = 1
    ) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        config = Config.of(blocking)
        where = UniqueId.from_buffer_copy(unique_id)
        self.CommInitRankConfig(ctypes.byref(made), world_size, where, rank, ctypes.byref(config))
        return made

    def state(self, comm: ctypes.c_void_p) -> int:
        state = ctypes.c_int()
        self.CommGetAsyncError(comm, ctypes.byref(state))
        return state.value

    def await_state(self, comm: ctypes.c_void_p, *, until: Callable[[int], bool]) -> int:
        while not until(state := self.state(comm)):
            os.sched_yield()
        return state

    def settle(self, comm: ctypes.c_void_p) -> int:
        return self.await_state(comm, until=lambda state: state != IN_PROGRESS)

    def ask(self, name: str, comm: ctypes.c_void_p) -> int:
        value = ctypes.c_int()
        getattr(self, name)(comm, ctypes.byref(value))
        return value.value


def _as_c(value: Any) -> Any:
    """Let arrays be pointers, streams handles, and plain numbers what they look like."""
    if hasattr(value, "address"):
        return ctypes.c_void_p(value.address)
    if hasattr(value, "handle"):
        return ctypes.c_void_p(value.handle)
    if isinstance(value, int) and value > 2**31 - 1:
        return ctypes.c_size_t(value)
    return value


def size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def shared_id(addr: str) -> bytes:
    """Make the same id on all ranks from the address that `run_ranks` gives them."""
    digest = addr.encode()[-16:]
    return (0x6F727265666E6363).to_bytes(8, "little") + digest + bytes(104)


def end_of_child(body: Callable[[], Any]) -> tuple[int, str]:
    """Run `body` in a forked child; return the signal that ended it, or 0, and its stderr."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 2)
        os.close(reading)
        try:
            body()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(pid, 0)
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), text


ABORTED = signal.SIGABRT
