"""What of the contract NCCL cannot keep, and why. Everything else is asked of it.

`EXCLUDED` names cases; `reduces` tells which reductions the cases that remain may ask for.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from backends.contract.reference import COMPLEX, has_reduction

from ferro_dist.reduce_op import ReduceOp

__all__ = ["EXCLUDED", "EXCLUDED_ON_REAL_GPUS", "names_on_gpu", "reduces"]

_BOTH = ("nccl", "hybrid")
_NCCL = ("nccl",)
_EVERY = ("nccl", "hybrid", "hybrid_host")

_NO_COMPARISON = "NCCL does not compare what ranks call: they hang, or get a wrong result"
_NO_ENVELOPE = "a message of NCCL carries neither size nor tag"
_IN_ORDER = "the calls of a group run one after the other, whatever stream each is on"
_RENDEZVOUS = "a send of NCCL ends when its receive does"
_NO_CULPRIT = "NCCL cannot tell which rank it waits for; see test_gpu_faults"
_HOST_ARRAYS = "only arrays of the host are like this; see test_nccl_backend"
_HOST_LIFETIME = (
    "it watches the lifetime of the host's arrays, not the GPU's; see test_gpu_lifetimes"
)
_NO_GOODBYE = "ranks of NCCL leave a group together; see test_gpu_faults"

# By patterns of the cases' names: which backends they are not asked of, and why.
EXCLUDED: dict[str, tuple[tuple[str, ...], str]] = {
    "*mismatches_*": (_BOTH, _NO_COMPARISON),
    "a_mismatch_is_raised_by_every_wait": (_BOTH, _NO_COMPARISON),
    "uneven_counts_that_disagree_are_a_mismatch": (_BOTH, _NO_COMPARISON),
    "a_message_that_does_not_fit_is_dropped": (_BOTH, _NO_ENVELOPE),
    "an_awaited_message_that_does_not_fit_is_dropped": (_BOTH, _NO_ENVELOPE),
    "a_misfit_in_a_batch_spares_the_rest": (_BOTH, _NO_ENVELOPE),
    "a_small_send_needs_no_receiver_yet": (_BOTH, _RENDEZVOUS),
    "messages_overtake_collectives_that_wait": (_BOTH, _IN_ORDER),
    "receives_may_outstay_collectives": (_BOTH, _IN_ORDER),
    "a_receive_that_waits_holds_up_no_message_of_another_peer": (_BOTH, _IN_ORDER),
    "messages_and_collectives_go_on_in_two_threads": (_BOTH, _IN_ORDER),
    "waiting_may_be_given_up_and_taken_up_again": (_NCCL, _IN_ORDER),
    "*refuses_arrays_it_cannot_*": (_BOTH, _HOST_ARRAYS),
    "buffers_are_arrays": (_BOTH, _HOST_ARRAYS),
    "arrays_live_until_their_call_is_done": (_BOTH, _HOST_LIFETIME),
    "work_that_was_waited_for_holds_nothing_back": (_BOTH, _HOST_LIFETIME),
    "a_rank_that_does_not_come_is_named_by_the_timeout": (_BOTH, _NO_CULPRIT),
    "who_gives_up_waiting_for_*": (_BOTH, _NO_CULPRIT),
    "a_split_that_a_rank_does_not_call_is_named_by_the_timeout": (_NCCL, _NO_CULPRIT),
    "work_names_the_part_of_a_group_that_it_is_of": (_BOTH, "see test_gpu_faults"),
    "a_receive_times_out_and_names_its_peer": (_BOTH, _NO_CULPRIT),
    "a_queued_call_times_out": (_BOTH, _NO_CULPRIT),
    "an_interruption_ends_the_group_*": (_NCCL, "NCCL tells nobody; HybridBackend does"),
    "a_peer_that_left_in_order_is_named": (_EVERY, _NO_GOODBYE),
    "messages_of_a_peer_that_left_still_arrive": (_EVERY, _NO_GOODBYE),
    "closing_ends_calls_of_other_threads": (_EVERY, _NO_GOODBYE),
    "closing_with_calls_queued_fails_them": (_EVERY, _NO_GOODBYE),
}

_OWN_ROUNDING = "a GPU rounds sums of 16 bits at every step"
_ONE_GPU = "groups that share a GPU may keep each other's kernels from running"

# What the emulation keeps, which reduces as the engine does, and real GPUs do not.
EXCLUDED_ON_REAL_GPUS: dict[str, str] = {
    "*_sums_are_rounded_once": _OWN_ROUNDING,
    "half_precision_keeps_small_addends": _OWN_ROUNDING,
    "*_of_special_values_equals_numpy": "whether NaN is kept is up to NCCL",
    "two_groups_are_used_by_two_threads": _ONE_GPU,
}


def names_on_gpu(backend: str, names: Iterable[str]) -> list[str]:
    """Return the cases that are asked of a backend."""
    patterns = [pattern for pattern, (backends, _) in EXCLUDED.items() if backend in backends]
    return [
        name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def reduces(name: str, op: ReduceOp, world_size: int) -> bool | None:
    """Whether NCCL has a reduction; None where it has one that is no part of the contract."""
    if op is ReduceOp.MEAN and world_size & (world_size - 1) and has_reduction(name, op):
        return None  # it multiplies by 1/n, rounded, and not in a wider type
    if name in ("int16", "uint16"):
        return False  # it moves their bytes
    if name in COMPLEX:
        return op in (ReduceOp.SUM, ReduceOp.MEAN)  # as pairs of real numbers
    if name.startswith("float8"):
        return None  # with their own rounding, from NCCL 2.24 and sm_90 on
    return has_reduction(name, op)
