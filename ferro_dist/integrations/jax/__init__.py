"""What JAX users train with.

Two entrances: `ddp`, with `gradients` and `tap` as its parts, and `stage`, whose `JaxStage` makes a
stage of a pipeline. Both use `leaves`.
"""
