"""Collectives for Python arrays: shared memory inside a host, TCP between hosts, NCCL, or MPI.

Start with `init`, `allreduce`, `DDP` and `Pipeline`. Where torch is installed there are also
`ShardedOptimizer` and `convert_sync_batchnorm`. `ferro_dist.testing` runs ranks in tests,
`ferro_dist.parallel.schedules` makes, checks and draws schedules of pipelines.
"""

from __future__ import annotations

import importlib

# Not from typing, whose import would cost ferrorun 5 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ferro_dist.backends.base import Backend as Backend
    from ferro_dist.backends.host import HostBackend as HostBackend
    from ferro_dist.backends.host import TcpBackend as TcpBackend
    from ferro_dist.backends.hybrid import HybridBackend as HybridBackend
    from ferro_dist.backends.mpi import MpiBackend as MpiBackend
    from ferro_dist.backends.nccl import NcclBackend as NcclBackend
    from ferro_dist.backends.nccl import dtype_to_nccl as dtype_to_nccl
    from ferro_dist.backends.nccl import get_unique_id as get_unique_id
    from ferro_dist.backends.nccl import is_nccl_available as is_nccl_available
    from ferro_dist.backends.nccl import reduce_op_to_nccl as reduce_op_to_nccl
    from ferro_dist.backends.simulated import SimulatedBackend as SimulatedBackend
    from ferro_dist.collective import all_gather as all_gather
    from ferro_dist.collective import all_to_all as all_to_all
    from ferro_dist.collective import allreduce as allreduce
    from ferro_dist.collective import barrier as barrier
    from ferro_dist.collective import broadcast as broadcast
    from ferro_dist.collective import empty as empty
    from ferro_dist.collective import gather as gather
    from ferro_dist.collective import reduce as reduce
    from ferro_dist.collective import reduce_scatter as reduce_scatter
    from ferro_dist.collective import scatter as scatter
    from ferro_dist.errors import BackendUnavailable as BackendUnavailable
    from ferro_dist.errors import ChannelClosed as ChannelClosed
    from ferro_dist.errors import CollectiveMismatch as CollectiveMismatch
    from ferro_dist.errors import DistributedError as DistributedError
    from ferro_dist.errors import GpuFallbackWarning as GpuFallbackWarning
    from ferro_dist.errors import InvalidArray as InvalidArray
    from ferro_dist.errors import InvalidRank as InvalidRank
    from ferro_dist.errors import InvalidWorldSize as InvalidWorldSize
    from ferro_dist.errors import Io as Io
    from ferro_dist.errors import LockPoisoned as LockPoisoned
    from ferro_dist.errors import NoConnection as NoConnection
    from ferro_dist.errors import PeerLostError as PeerLostError
    from ferro_dist.errors import SelfSend as SelfSend
    from ferro_dist.errors import SizeMismatch as SizeMismatch
    from ferro_dist.errors import Timeout as Timeout
    from ferro_dist.errors import UnsupportedOp as UnsupportedOp
    from ferro_dist.gpu_collective import gpu_allreduce as gpu_allreduce
    from ferro_dist.gpu_collective import gpu_broadcast as gpu_broadcast
    from ferro_dist.group import init as init
    from ferro_dist.integrations.torch.sharded_optimizer.sharded_optimizer import (
        ShardedOptimizer as ShardedOptimizer,
    )
    from ferro_dist.integrations.torch.sync_batch_norm import (
        convert_sync_batchnorm as convert_sync_batchnorm,
    )
    from ferro_dist.parallel.buckets.power_sgd import PowerSGD as PowerSGD
    from ferro_dist.parallel.ddp.ddp import DDP as DDP
    from ferro_dist.parallel.pipeline.outcome import StageFailed as StageFailed
    from ferro_dist.parallel.pipeline.pipeline import Pipeline as Pipeline
    from ferro_dist.parallel.pipeline.rank_grid import RankGrid as RankGrid
    from ferro_dist.parallel.pipeline.split_sequential import split_sequential as split_sequential
    from ferro_dist.parallel.schedules import InvalidSchedule as InvalidSchedule
    from ferro_dist.parallel.schedules import PipelineSchedule as PipelineSchedule
    from ferro_dist.point_to_point import P2POp as P2POp
    from ferro_dist.point_to_point import batch as batch
    from ferro_dist.point_to_point import recv as recv
    from ferro_dist.point_to_point import send as send
    from ferro_dist.point_to_point import sendrecv as sendrecv
    from ferro_dist.reduce_op import ReduceOp as ReduceOp
    from ferro_dist.work import Work as Work

    __version__: str

# Names are loaded when they are first used: `ferrorun`, which uses none of them, starts in a third
# of the time.
_MODULES = {
    "backends.base": "Backend",
    "backends.host": "HostBackend TcpBackend",
    "backends.hybrid": "HybridBackend",
    "backends.mpi": "MpiBackend",
    "backends.nccl": "NcclBackend dtype_to_nccl get_unique_id is_nccl_available reduce_op_to_nccl",
    "backends.simulated": "SimulatedBackend",
    "collective": (
        "all_gather all_to_all allreduce barrier broadcast empty gather reduce reduce_scatter "
        "scatter"
    ),
    "errors": (
        "BackendUnavailable ChannelClosed CollectiveMismatch DistributedError GpuFallbackWarning "
        "InvalidArray InvalidRank InvalidWorldSize Io LockPoisoned NoConnection PeerLostError "
        "SelfSend SizeMismatch Timeout UnsupportedOp"
    ),
    "gpu_collective": "gpu_allreduce gpu_broadcast",
    "group": "init",
    "integrations.torch.sharded_optimizer.sharded_optimizer": "ShardedOptimizer",
    "integrations.torch.sync_batch_norm": "convert_sync_batchnorm",
    "parallel.buckets.power_sgd": "PowerSGD",
    "parallel.ddp.ddp": "DDP",
    "parallel.pipeline.outcome": "StageFailed",
    "parallel.pipeline.pipeline": "Pipeline",
    "parallel.pipeline.rank_grid": "RankGrid",
    "parallel.pipeline.split_sequential": "split_sequential",
    "parallel.schedules": "InvalidSchedule PipelineSchedule",
    "point_to_point": "P2POp batch recv send sendrecv",
    "reduce_op": "ReduceOp",
    "work": "Work",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

# A star import must not need torch.
__all__ = sorted(n for n, module in _MODULE_OF.items() if not module.startswith("integrations."))


if not TYPE_CHECKING:  # else type checkers would take any name for one of this module's

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata

            try:
                value: Any = metadata.version("ferro_dist")
            except metadata.PackageNotFoundError:
                value = "(used from a source tree, not installed)"
        elif name in _MODULE_OF:
            module = importlib.import_module(f"ferro_dist.{_MODULE_OF[name]}")
            value = getattr(module, name)
        else:
            raise AttributeError(f"module 'ferro_dist' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    from importlib.util import find_spec

    # help() loads every name in this list: none of them may fail without torch.
    try:
        has_torch = find_spec("torch") is not None
    except ValueError:  # something else has taken its place in sys.modules
        has_torch = False
    names = {*(_MODULE_OF if has_torch else __all__), "__version__", *globals()}
    return sorted(names - {"TYPE_CHECKING", "annotations", "importlib"})
