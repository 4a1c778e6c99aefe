"""ZeRO-1 for torch: `sharded_optimizer`, its parameters (`shard`), its state (`state`)."""
