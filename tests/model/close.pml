/* Clean close: a rank that leaves spoils nothing that it took part in, and
 * nobody waits for it afterwards.
 *
 * Every rank runs one collective; then it closes, or enters a second one. A rank
 * that waits for a departed one aborts the group with that one as the culprit.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef DEPTH
#define DEPTH 1
#endif
#define CORES RANKS
#define FLAG(rank) (rank)
#define WAITS_FOR(rank) (RANKS + (rank))
#define DEPARTED(rank) (2 * RANKS + (rank))
#define ABORT (3 * RANKS)
#define WORDS (3 * RANKS + 1)

#include "waiting.pml"

byte agreed;

inline raise_aborted(core, s, seen) {
  load(core, ABORT, seen);
  d_step {
    assert(s == 2); /* the first collective had everybody in it: it must succeed */
    assert(seen != 0);
    assert(agreed == 0 || agreed == seen);
    agreed = seen
  }
}

/* Looks for the end of the group first and for the flag last: a peer may publish,
 * finish and depart between two loads of ours. */
inline look(r, q, s, has_ended, has_left, seen) {
#ifdef BUG_FLAG_TESTED_FIRST
  load(r, FLAG(q), seen);
  load(r, DEPARTED(q), has_left);
  load(r, ABORT, has_ended)
#else
  load(r, ABORT, has_ended);
  load(r, DEPARTED(q), has_left);
  load(r, FLAG(q), seen)
#endif
}

proctype rank(byte r) {
  byte s = 1, q, w, seen, has_ended, has_left;
next:
  announce(r, FLAG(r), s, w, seen);
  q = 0;
  do
  :: q == RANKS -> break
  :: q == r -> q++
  :: q < RANKS && q != r ->
     store(r, WAITS_FOR(r), q + 1);
     full_fence(r);
     look(r, q, s, has_ended, has_left, seen);
     if
     :: seen >= s -> q++
     :: seen < s && has_ended -> raise_aborted(r, s, seen); goto out
     :: seen < s && !has_ended && has_left ->
        abort_group(r, q + 1, w, seen);
        raise_aborted(r, s, seen);
        goto out
     :: else -> futex_wait(r, WAITS_FOR(r), q + 1); store(r, WAITS_FOR(r), 0)
     fi
  od;
  if
  :: s == 1 -> s = 2; goto next
  :: announce(r, DEPARTED(r), 1, w, seen)
  fi;
out:
  skip
}

init {
  byte i;
  atomic { for (i : 0 .. RANKS - 1) { run rank(i); run drain(i) } }
}
