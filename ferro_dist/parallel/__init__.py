"""What users train with, on top of the collectives.

Reading order. Data parallelism: `ddp` (what every kind of module provides), `manifest`, `bucket`,
`reducer`, then `array_ddp` and `ferro_dist.integrations.torch_ddp`. Pipelines: `schedules`,
`pipeline`, `pipeline_connection`, `executor`, `stage`, `activation_channel`, `message_header`,
`ends`, `outcome`.
"""
