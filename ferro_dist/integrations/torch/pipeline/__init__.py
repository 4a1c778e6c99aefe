"""Stages of a pipeline that are torch modules.

`stage` runs them. Its parts: `backward_split` for zero-bubble schedules, `surroundings` for
checkpoints.
"""
