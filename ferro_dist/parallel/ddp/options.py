"""The options of DDP, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ferro_dist.arguments import check_root, integer
from ferro_dist.backends.base import Backend
from ferro_dist.parallel.buckets.averaging import Averaging
from ferro_dist.parallel.buckets.bucket import ParameterSpec, bucket_nbytes_of
from ferro_dist.parallel.buckets.compression import Compression, check_compress, name_of, wire_dtype
from ferro_dist.parallel.buckets.power_sgd import PowerSGD

__all__ = ["Options"]

CORES_TO_OVERLAP = 2.0
"""Cores that each rank needs so that backward and a reduction need not take turns on one."""


@dataclass(frozen=True)
class Options:
    """The keywords of `DDP`, whose signature holds their defaults.

    Raises
    ------
    TypeError, ValueError, InvalidRank
        One of them makes no sense.
    """

    backend: Backend
    bucket_mb: float
    average: str
    compress: Compression
    overlap: bool | str
    sync_buffers: bool
    root: int

    def __post_init__(self) -> None:
        _ = self.bucket_nbytes  # raises if there is no such size
        is_always = isinstance(self.overlap, str) and self.overlap == "always"
        if not (is_always or _is_flag(self.overlap)):
            raise ValueError(f"DDP: overlap must be True, False or 'always', not {self.overlap!r}")
        if not _is_flag(self.sync_buffers):
            raise ValueError(f"DDP: sync_buffers must be True or False, not {self.sync_buffers!r}")
        check_compress(self.compress)
        _ = self.averaging  # raises if there is no such average
        backend = self.backend
        check_root("DDP", self.root, rank=backend.rank, world_size=backend.world_size)

    @property
    def bucket_nbytes(self) -> int:
        """Largest bucket."""
        return bucket_nbytes_of(self.bucket_mb, "DDP")

    @property
    def averaging(self) -> Averaging:
        """How the gradients of the ranks are combined."""
        return Averaging(self.average, self.backend.world_size)

    @property
    def is_overlapped(self) -> bool:
        """Whether to reduce while backward goes on.

        A reduction in shared memory is done by a core, not by a separate device. With fewer than
        two cores per rank, the progress thread would take from backward the very time that it
        saves, plus a switch of threads for each bucket.
        """
        if self.overlap == "always":
            return True
        has_cores = self.backend.cores_per_rank >= CORES_TO_OVERLAP
        return bool(self.overlap) and has_cores and self.backend.world_size > 1

    def is_overlapped_with(self, specs: Iterable[ParameterSpec]) -> bool:
        """Whether to do so with these parameters: what a GPU reduces takes no core's time."""
        return self.is_overlapped or (bool(self.overlap) and any(spec.is_on_gpu for spec in specs))

    def check_parameters(self, specs: Sequence[ParameterSpec]) -> None:
        """Raise InvalidArray or ValueError unless their gradients can be averaged as asked."""
        if isinstance(self.compress, PowerSGD) and self.backend.world_size > 1:
            self.compress.check_reach(specs)
        for spec in specs:
            travelling = wire_dtype(self.compress, spec.dtype) or spec.dtype
            self.averaging.check_countable(spec.name, travelling)

    def __str__(self) -> str:
        compress = name_of(self.compress)
        return (
            f"bucket_mb={self.bucket_mb}, compress={compress}, sync_buffers={self.sync_buffers}, "
            f"average={self.average!r}, root={integer(self.root)}"
        )


def _is_flag(value: object) -> bool:
    return isinstance(value, (bool, int, np.bool_)) and value in (0, 1)
