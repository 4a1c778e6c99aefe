"""Data parallelism.

Reading order: `ddp` (what every kind of module provides), `reducing_ddp`, `reducer`, then
`array_ddp` and `ferro_dist.integrations.torch.ddp.ddp`.
"""
