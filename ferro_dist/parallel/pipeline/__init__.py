"""Pipeline parallelism.

Reading order: `ferro_dist.parallel.schedules.action`, then `pipeline`, `connection`, `executor`,
`stage`, `activation_channel`, `message_header`, `ends`, `outcome`.
"""
