/* Memory as x86-64 shows it to other cores, and futexes on it.
 *
 * A store waits in a FIFO buffer of its core until drain() moves it to memory[];
 * the core itself sees it at once, the others only then. That is the one
 * reordering x86 has (a later load overtakes an earlier store), and the one that
 * a full fence forbids. Locked instructions and system calls drain the buffer.
 *
 * The including file defines CORES, WORDS and DEPTH (entries of a buffer).
 */
byte memory[WORDS];

typedef Stores { byte count; byte address[DEPTH]; byte value[DEPTH] };
Stores pending[CORES];

bit asleep[CORES];  /* the thread on this core is in the kernel's queue of its futex */

proctype drain(byte core) {
  byte i;
end:
  do
  :: d_step {
       pending[core].count > 0 ->
       memory[pending[core].address[0]] = pending[core].value[0];
       pending[core].count--;
       for (i : 0 .. DEPTH - 2) {
         pending[core].address[i] = pending[core].address[i + 1];
         pending[core].value[i] = pending[core].value[i + 1]
       }
       pending[core].address[pending[core].count] = 0;
       pending[core].value[pending[core].count] = 0;
       i = 0
     }
  od
}

inline store(core, word, new) {
  d_step {
    pending[core].count < DEPTH ->
    pending[core].address[pending[core].count] = word;
    pending[core].value[pending[core].count] = new;
    pending[core].count++
  }
}

/* The newest of this core's own pending stores hides memory. */
inline load(core, word, into) {
  d_step {
    into = memory[word];
    if
    :: pending[core].count > 0 && pending[core].address[0] == word -> into = pending[core].value[0]
    :: else
    fi;
#if DEPTH > 1
    if
    :: pending[core].count > 1 && pending[core].address[1] == word -> into = pending[core].value[1]
    :: else
    fi
#endif
  }
}

inline full_fence(core) { pending[core].count == 0 }

inline exchange(core, word, new, old) {
  d_step { pending[core].count == 0 -> old = memory[word]; memory[word] = new }
}

inline compare_exchange(core, word, expected, new, old) {
  d_step {
    pending[core].count == 0 ->
    old = memory[word];
    if :: old == expected -> memory[word] = new :: else fi
  }
}

/* The kernel compares and queues under one lock; a changed word returns at once. */
inline futex_wait(core, word, expected) {
  d_step {
    pending[core].count == 0 ->
    if :: memory[word] == expected -> asleep[core] = 1 :: else fi
  };
  asleep[core] == 0
}

inline futex_wake(core) { asleep[core] = 0 }
