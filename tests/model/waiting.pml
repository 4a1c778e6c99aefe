/* The sleepers' words: how a rank is woken by one peer or by an abort.
 *
 * WAITS_FOR(w) holds q + 1 while rank w sleeps, or is about to, until rank q
 * does something; w's thread runs on core w. The including file defines RANKS,
 * WAITS_FOR(rank), ABORT (the abort word) and what tso.pml needs.
 */
#include "tso.pml"

/* Sets the word of w to 0 before waking: w, if it is only about to sleep, must
 * find another value than the one it expects. */
inline wake_if_waiting(r, w, seen) {
  load(r, WAITS_FOR(w), seen);
  if
  :: seen == r + 1 ->
#if defined(BUG_WAKE_BEFORE_ZERO)
     futex_wake(w);
     exchange(r, WAITS_FOR(w), 0, seen)
#elif defined(BUG_WORD_LEFT)
     futex_wake(w)
#else
     exchange(r, WAITS_FOR(w), 0, seen);
     if :: seen != 0 -> futex_wake(w) :: else fi
#endif
  :: else
  fi
}

/* Rank r tells everybody: stores value, then wakes those who wait for r. */
inline announce(r, word, value, w, seen) {
  store(r, word, value);
#ifndef BUG_NO_FENCE_AFTER_PUBLISH
  full_fence(r);
#endif
#ifndef BUG_NO_WAKE
  w = 0;
  do
  :: w == RANKS -> break
  :: w == r -> w++
  :: w < RANKS && w != r -> wake_if_waiting(r, w, seen); w++
  od;
  w = 0; seen = 0
#endif
}

/* Sets every word, then wakes, whatever the word held: a peer may have set it
 * to 0 and died before its wake. */
inline wake_all(core, w, seen) {
  w = 0;
  do
  :: w == RANKS -> break
  :: w < RANKS ->
#if defined(BUG_ZERO_WORD_SKIPPED)
     exchange(core, WAITS_FOR(w), 0, seen);
     if :: seen != 0 -> futex_wake(w) :: else fi;
#elif defined(BUG_ABORT_LEAVES_WORDS)
     futex_wake(w);
#else
     exchange(core, WAITS_FOR(w), 0, seen);
     futex_wake(w);
#endif
     w++
  od;
  w = 0; seen = 0
}

/* The first reason stays. Who comes second wakes all the same: the first may
 * have died before it did. */
inline abort_group(core, reason, w, seen) {
#ifdef BUG_WAKE_BEFORE_ABORT_WORD
  wake_all(core, w, seen);
#endif
#ifdef BUG_ABORT_WORD_STORED
  load(core, ABORT, seen);
  if :: seen == 0 -> store(core, ABORT, reason); full_fence(core) :: else fi;
#else
  compare_exchange(core, ABORT, 0, reason, seen);
#endif
#if defined(BUG_LOSER_DOES_NOT_WAKE)
  if :: seen == 0 -> wake_all(core, w, seen) :: else -> seen = 0 fi
#elif !defined(BUG_WAKE_BEFORE_ABORT_WORD)
  wake_all(core, w, seen)
#endif
}
