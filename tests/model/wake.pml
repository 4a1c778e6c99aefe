/* Publish and sleep: no wake-up is lost.
 *
 * Every rank runs COLLECTIVES collectives: it stores its flag, wakes who waits
 * for it, and waits for every peer's flag. The spinning before the sleep is the
 * first load; nothing here has a timeout, so a lost wake-up is a deadlock.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef COLLECTIVES
#define COLLECTIVES 2
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#define CORES RANKS
#define FLAG(rank) (rank)
#define WAITS_FOR(rank) (RANKS + (rank))
#define ABORT 0 /* nobody aborts here */
#define WORDS (2 * RANKS)

#include "waiting.pml"

inline wait_for(r, q, s, seen) {
  do
  :: load(r, FLAG(q), seen);
     if :: seen >= s -> break :: else fi;
     store(r, WAITS_FOR(r), q + 1);
#ifndef BUG_NO_FENCE_BEFORE_SLEEP
     full_fence(r);
#endif
#ifndef BUG_NO_RECHECK
     load(r, FLAG(q), seen);
     if :: seen >= s -> break :: else fi;
#endif
     futex_wait(r, WAITS_FOR(r), q + 1);
     store(r, WAITS_FOR(r), 0)
  od;
  seen = 0
}

proctype rank(byte r) {
  byte s = 1, q, w, seen;
  do
  :: s > COLLECTIVES -> break
  :: s <= COLLECTIVES ->
     announce(r, FLAG(r), s, w, seen);
     q = 0;
     do
     :: q == RANKS -> break
     :: q == r -> q++
     :: q < RANKS && q != r -> wait_for(r, q, s, seen); q++
     od;
     s++
  od
}

/* A signal or the end of a time slice: futex_wait returns, nothing has changed. */
proctype spurious_wake(byte r) { futex_wake(r) }

init {
  byte i;
  atomic {
    for (i : 0 .. RANKS - 1) { run rank(i); run drain(i) }
#ifdef SPURIOUS
    run spurious_wake(0);
    run spurious_wake(1)
#endif
  }
}
