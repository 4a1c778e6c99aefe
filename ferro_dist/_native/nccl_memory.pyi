from typing import final

from ferro_dist._native.cuda_memory import GpuBytes

__all__ = ["NcclMemory"]

@final
class NcclMemory(GpuBytes):
    def close(self) -> None: ...
    def __del__(self) -> None: ...
