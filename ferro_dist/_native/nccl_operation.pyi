from typing_extensions import disjoint_base

from ferro_dist.reduce_op import ReduceOp

__all__ = ["Member", "dtype_to_nccl", "reduce_op_to_nccl"]

@disjoint_base
class Member:
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> int: ...

def dtype_to_nccl(dtype: str) -> int: ...
def reduce_op_to_nccl(op: ReduceOp | str) -> int: ...
