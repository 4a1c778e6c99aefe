/* The watchdog ring: no death goes unseen, nobody living is convicted. Nor does a second
 * one: survivors that make a smaller group must not wait for it.
 *
 * Each rank has a thread that holds a liveness word, and one that sleeps on its successor's.
 * Up to DEATHS ranks are killed at any step; the kernel then marks the word and
 * wakes one of its sleepers. Ranks may close at any time; their watcher goes on
 * to the next one. Aborting is one step here (abort.pml has it in full).
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef DEATHS
#define DEATHS 2
#endif

mtype = { HELD, RELEASED, DIED };
mtype liveness[RANKS];
bool is_departed[RANKS];    /* in the control block, for waiters: close.pml */
bool is_killed[RANKS];
bool must_stop[RANKS];      /* the watchdog of this rank, because the rank closes */
bool has_watchdog[RANKS];
bool is_asleep[RANKS];      /* the watchdog of this rank is in the kernel's queue */
byte watched[RANKS];        /* by the watchdog of this rank */
bool is_aborted;
byte deaths;

#define WORD_OF_WATCHED(r) liveness[watched[r]]
#define NEXT(rank) (((rank) + 1) % RANKS)

/* Wakes one watchdog that sleeps on the word of t, whichever the kernel likes. */
inline wake_one(t) {
  if
  :: is_asleep[0] && watched[0] == t -> is_asleep[0] = false
  :: is_asleep[1] && watched[1] == t -> is_asleep[1] = false
  :: is_asleep[2] && watched[2] == t -> is_asleep[2] = false
#if RANKS > 3
  :: is_asleep[3] && watched[3] == t -> is_asleep[3] = false
#endif
  :: else
  fi
}

inline abort_group(culprit) {
  atomic { assert(is_killed[culprit]); is_aborted = true }
}

proctype watchdog(byte r) {
  {
    watched[r] = NEXT(r);
    do
    :: watched[r] == r -> break
#ifdef BUG_STOPS_AFTER_DEPARTED
    :: WORD_OF_WATCHED(r) == RELEASED -> break
#else
    :: atomic { WORD_OF_WATCHED(r) == RELEASED -> watched[r] = NEXT(watched[r]) }
#endif
#ifdef BUG_DEPARTED_FLAG_TRUSTED
    :: atomic {
         WORD_OF_WATCHED(r) == DIED && is_departed[watched[r]] -> watched[r] = NEXT(watched[r])
       }
    :: WORD_OF_WATCHED(r) == DIED && !is_departed[watched[r]] ->
       abort_group(watched[r]); watched[r] = NEXT(watched[r])
#elif defined(BUG_STOPS_AFTER_DEAD)
       /* As if this thread held its rank's word: that is released then, and its own death is
        * marked by nobody. */
    :: WORD_OF_WATCHED(r) == DIED -> abort_group(watched[r]); liveness[r] = RELEASED; break
#else
    :: WORD_OF_WATCHED(r) == DIED -> abort_group(watched[r]); watched[r] = NEXT(watched[r])
#endif
       /* The word is read, and may change before futex_wait compares it again. */
    :: watched[r] != r && WORD_OF_WATCHED(r) == HELD ->
       d_step { if :: WORD_OF_WATCHED(r) == HELD -> is_asleep[r] = true :: else fi };
end_asleep:
       !is_asleep[r]
    od
  } unless { is_killed[r] || must_stop[r] };
  atomic { is_asleep[r] = false; has_watchdog[r] = false }
}

/* Closes the group. The watchdog is joined before the word is
 * released: with two sleepers on one word the kernel may wake the one that leaves.
 * (It must be stopped by something else than the word that it sleeps on.) */
proctype closer(byte r) {
  {
    is_departed[r] = true;
    must_stop[r] = true;
#ifndef BUG_WATCHDOG_NOT_JOINED
    !has_watchdog[r];
#endif
    atomic { liveness[r] = RELEASED; wake_one(r) }
  } unless { is_killed[r] }
}

/* SIGKILL, and later the kernel's walk of the robust list. */
proctype killer(byte r) {
  is_killed[r] = true;
  atomic {
    if
    :: liveness[r] == HELD -> liveness[r] = DIED; wake_one(r)
    :: liveness[r] != HELD
    fi
  }
}

/* Rank 0 stays and lives: the ring has no first rank, and without a survivor
 * there is nothing to claim. */
init {
  byte i;
  bool somebody_died;
  atomic {
    for (i : 0 .. RANKS - 1) { liveness[i] = HELD; has_watchdog[i] = true }
    for (i : 0 .. RANKS - 1) {
      run watchdog(i);
      if :: i > 0 -> run closer(i) :: true -> skip fi;
      if :: i > 0 && deaths < DEATHS -> deaths++; run killer(i) :: true -> skip fi
    }
  };
  timeout; /* nothing moves any more */
  d_step {
    for (i : 0 .. RANKS - 1) {
      somebody_died = somebody_died || liveness[i] == DIED;
      /* Unless it had closed, a killed rank is marked. */
      assert(!is_killed[i] || is_departed[i] || liveness[i] == DIED)
    }
    assert(is_aborted || !somebody_died)
  }
}
