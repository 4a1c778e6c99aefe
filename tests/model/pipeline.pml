/* The staging window: K slots per rank, each reused without a barrier.
 *
 * One-phase: stage(k) | consume(k). TWO_PHASE: stage(k) | reduce(k) | collect(k).
 * Each phase comes LAG chunks after the one before. ROOTED: rank 0 only stages and
 * the others only consume. Counters only grow. A reader looks twice at a slot, a
 * writer leaves TORN in it half-way.
 * Claims: no slot is rewritten under a reader, and nobody waits for ever.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef LAG
#define LAG 1
#endif
#ifndef K
#define K 3
#endif
#define CHUNKS (2 * K + 2)
#define TORN 255
#define SLOT(rank, k) ((rank) * K + (k) % K)

#ifdef TWO_PHASE
#define LAST_PHASE (2 * LAG)
#else
#define LAST_PHASE LAG
#endif

#ifdef ROOTED
#define PRODUCERS 1
#define CONSUMES(r) ((r) != 0)
#else
#define PRODUCERS RANKS
#define CONSUMES(r) true
#endif

byte staged[RANKS], reduced[RANKS], consumed[RANKS]; /* counters that peers wait for */
byte window[RANKS * K], result[RANKS * K];

/* At least k - K + 1 of everybody's chunks are consumed: slot k % K is free. */
#if defined(BUG_NO_CONSUMED_CHECK)
#define IS_FREE(q, k) true
#elif defined(BUG_CONSUMED_OFF_BY_ONE)
#define IS_FREE(q, k) (consumed[q] + K >= (k))
#else
#define IS_FREE(q, k) (consumed[q] + K >= (k) + 1)
#endif

#define WRITE(area, r, k) area[SLOT(r, k)] = TORN; area[SLOT(r, k)] = (k)
#define READ(area, q, k) assert(area[SLOT(q, k)] == (k)); assert(area[SLOT(q, k)] == (k))

inline stage(r, q, k) {
  q = 0;
  do
  :: q == RANKS -> break
  :: q == r -> q++
  :: q < RANKS && q != r -> IS_FREE(q, k); q++
  od;
  WRITE(window, r, k);
  staged[r] = k + 1
}

inline read_window(r, q, k) {
  q = 0;
  do
  :: q == PRODUCERS -> break
  :: q < PRODUCERS && q == r -> q++
  :: q < PRODUCERS && q != r -> staged[q] >= k + 1; READ(window, q, k); q++
  od
}

inline reduce(r, q, k) {
  read_window(r, q, k);
  WRITE(result, r, k);
  reduced[r] = k + 1
}

inline collect(r, q, k) {
  q = 0;
  do
  :: q == RANKS -> break
  :: q == r -> q++
  :: q < RANKS && q != r -> reduced[q] >= k + 1; READ(result, q, k); q++
  od;
  consumed[r] = k + 1
}

inline consume(r, q, k) {
  read_window(r, q, k);
  consumed[r] = k + 1
}

proctype rank(byte r) {
  byte i, q;
  do
  :: i == CHUNKS + LAST_PHASE -> break
  :: i < CHUNKS + LAST_PHASE ->
     if :: i < CHUNKS && r < PRODUCERS -> stage(r, q, i) :: else fi;
#ifdef TWO_PHASE
     if :: i >= LAG && i - LAG < CHUNKS -> reduce(r, q, i - LAG) :: else fi;
     if :: i >= 2 * LAG -> collect(r, q, i - 2 * LAG) :: else fi;
#else
     if :: i >= LAG && CONSUMES(r) -> consume(r, q, i - LAG) :: else fi;
#endif
     i++
  od
}

init {
  byte i;
  atomic { for (i : 0 .. RANKS - 1) { run rank(i) } }
}
