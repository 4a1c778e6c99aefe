"""What users train with, on top of the collectives.

`ddp` and `pipeline` do not know each other. Under both: `schedules`, which computes and needs no
group, `buckets` of gradients, and the modules beside this one.
"""
