/* Threads of one rank share its messages: nobody sleeps on what has come.
 *
 * Each thread waits for one message. Whoever holds the gate takes what has come, for all;
 * of those who sleep outside it one, the watch, sleeps on the word that peers wake, and the
 * others follow it. Memory is sequentially consistent here: wake.pml has the fences. Nothing
 * has a timeout, so a lost wake-up is a deadlock.
 */
#ifndef THREADS
#define THREADS 2
#endif
#define AWAKE 0
#define ANY_PEER 1
#define NOBODY 255

bool has_come[THREADS], is_done[THREADS], is_away[THREADS], has_returned[THREADS];
bool is_gate_taken, is_watched;
byte word = AWAKE, news, num_followers;
byte watch = NOBODY;        /* who sleeps on the word */
bool is_following[THREADS]; /* who sleeps on the news */

inline enter() { atomic { !is_gate_taken -> is_gate_taken = true } }
inline leave() { is_gate_taken = false }

inline call_followers(k) {
  news++;
  if
  :: num_followers != 0 ->
     d_step { for (k : 0 .. THREADS - 1) { is_following[k] = false } }
  :: else
  fi
}

/* Notify: the followers, then the word. */
inline tell_others(k) {
  call_followers(k);
  if
  :: is_watched -> word = AWAKE; watch = NOBODY
  :: else
  fi
}

inline progress(has_moved, j, k) {
  has_moved = false;
  j = 0;
  do
  :: j == THREADS -> break
  :: j < THREADS ->
     if
     :: has_come[j] && !is_done[j] ->
        is_done[j] = true;
        has_moved = true;
#ifndef BUG_TELLS_NOBODY
        if
        :: is_away[j] -> tell_others(k)
        :: else
        fi
#endif
     :: else
     fi;
     j++
  od
}

inline sleep_as_watch(i, has_moved, j, k) {
  word = ANY_PEER;
#ifndef BUG_NO_RECHECK
  progress(has_moved, j, k);
#endif
  if
  :: has_moved -> word = AWAKE
  :: else ->
     is_watched = true;
     leave();
     atomic { if :: word == ANY_PEER -> watch = i :: else fi };
     watch != i;
     word = AWAKE;
     enter();
     is_watched = false
  fi
}

inline follow(i, heard) {
#ifndef BUG_HEARS_LATE
  heard = news;
  num_followers++;
  leave();
#else
  num_followers++;
  leave();
  heard = news;
#endif
  atomic { if :: news == heard -> is_following[i] = true :: else fi };
  !is_following[i];
  enter();
  num_followers--
}

proctype thread(byte i) {
  byte j, k, heard;
  bool has_moved;
  enter();
  do
  :: progress(has_moved, j, k);
     if :: is_done[i] -> break :: else fi;
     if
     :: has_moved -> leave(); enter() /* makes way for the others, and goes on */
     :: true ->
        is_away[i] = true;
        has_moved = false;
        if
        :: !is_watched -> sleep_as_watch(i, has_moved, j, k)
        :: else -> follow(i, heard)
        fi;
        is_away[i] = false
     fi
  od;
#ifndef BUG_NO_RELIEF
  if
  :: !is_watched && num_followers != 0 -> call_followers(k)
  :: else
  fi;
#endif
  leave();
  has_returned[i] = true
}

/* Each message but the last is an answer: it comes once the next thread has returned. */
proctype peer(byte i) {
  if
  :: i + 1 < THREADS -> has_returned[i + 1]
  :: else
  fi;
  has_come[i] = true;
  atomic {
    if
    :: word == ANY_PEER -> word = AWAKE; watch = NOBODY
    :: else
    fi
  }
}

init {
  byte i;
  atomic {
    for (i : 0 .. THREADS - 1) {
      run thread(i);
      run peer(i)
    }
  }
}
