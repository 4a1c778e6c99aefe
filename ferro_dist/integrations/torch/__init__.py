"""What torch users train with.

Four entrances: `ddp.ddp`, `pipeline.stage`, `sharded_optimizer.sharded_optimizer` and
`sync_batch_norm`. What only one of the first three needs is in its package; pipelines know nothing
of the other two. What several of them need is beside them.
"""
