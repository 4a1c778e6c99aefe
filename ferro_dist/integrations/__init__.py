"""What needs an array library other than NumPy; imported only on demand.

`torch_ddp`, `torch_sharded_optimizer`, `torch_sync_batch_norm` and `torch_stage` are the entrances
for torch, `jax_ddp` and `jax_stage` those for JAX; the rest are their parts.
"""
