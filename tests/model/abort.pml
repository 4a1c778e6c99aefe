/* Abort: everybody leaves, for one reason, whoever dies half-way.
 *
 * Ranks 0 and 1 wait for rank 2. Rank 2 publishes its flag or aborts, and may be
 * killed at any step of either; then a watchdog thread of rank 1 aborts too.
 * Each waiter may lose patience (deadline, Ctrl-C) and abort on its own.
 */
#define RANKS 3
#define CORES 4
#ifndef DEPTH
#define DEPTH 1
#endif
#define VICTIM 2
#define WATCHDOG 3 /* its core */

#define WAITS_FOR(rank) (rank)
#define FLAG 3
#define ABORT 4
#define WORDS 5

#define REASON_OF(core) ((core) + 1)

#include "waiting.pml"

bool is_killed;
byte agreed; /* what the first survivor to leave in error gave as the reason */

inline raise_aborted(core, seen) {
  load(core, ABORT, seen);
  d_step {
    assert(seen != 0);
    assert(agreed == 0 || agreed == seen);
    agreed = seen
  }
}

proctype waiter(byte r) {
  byte w, seen;
  bool is_patient;
  if :: is_patient = true :: is_patient = false fi;
  do
  :: load(r, FLAG, seen);
     if :: seen == 1 -> break :: else fi;
     if
     :: !is_patient -> abort_group(r, REASON_OF(r), w, seen); raise_aborted(r, seen); break
     :: is_patient
     fi;
#ifdef BUG_ABORT_TESTED_FIRST
     load(r, ABORT, seen);
     if :: seen != 0 -> raise_aborted(r, seen); break :: else fi;
#endif
     store(r, WAITS_FOR(r), VICTIM + 1);
#ifndef BUG_NO_FENCE_BEFORE_SLEEP
     full_fence(r);
#endif
#ifndef BUG_ABORT_TESTED_FIRST
     load(r, ABORT, seen);
     if :: seen != 0 -> raise_aborted(r, seen); break :: else fi;
#endif
     load(r, FLAG, seen);
     if :: seen == 1 -> break :: else fi;
     futex_wait(r, WAITS_FOR(r), VICTIM + 1);
     store(r, WAITS_FOR(r), 0);
     if :: is_patient :: is_patient = false fi
  od
}

proctype victim() {
  byte w, seen;
  {
    if
    :: announce(VICTIM, FLAG, 1, w, seen)
    :: abort_group(VICTIM, REASON_OF(VICTIM), w, seen); raise_aborted(VICTIM, seen)
    fi
  } unless { is_killed }
}

/* The kernel stops a killed thread between two instructions; what it had stored
 * still drains. */
proctype killer() { if :: is_killed = true :: skip fi }

proctype watchdog() {
  byte w, seen;
end:
  is_killed -> abort_group(WATCHDOG, REASON_OF(WATCHDOG), w, seen)
}

init {
  byte i;
  atomic {
    run waiter(0);
    run waiter(1);
    run victim();
    run killer();
    run watchdog();
    for (i : 0 .. CORES - 1) { run drain(i) }
  }
}
