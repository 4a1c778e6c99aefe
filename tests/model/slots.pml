/* Header slots: two per rank, no trailing barrier.
 *
 * Every rank runs collectives for ever, as far ahead as the flags let it. A
 * payload is two words, so that a reader can catch it half rewritten.
 * Claim: whoever reads the payload of collective s reads s in both words.
 *
 * Sequence numbers go round at MODULUS. Slots are at most two collectives
 * apart, so eight numbers are as good as all of them, and the run is endless.
 */
#ifndef RANKS
#define RANKS 3
#endif
#define MODULUS 8

#ifdef BUG_SINGLE_SLOT
#define SLOT(s) 0
#else
#define SLOT(s) ((s) % 2)
#endif

#define AT(rank, s) ((rank) * 2 + SLOT(s))

byte low[RANKS * 2], high[RANKS * 2], flag[RANKS * 2];

inline publish(r, s) {
#ifdef BUG_FLAG_BEFORE_PAYLOAD
  flag[AT(r, s)] = s;
  low[AT(r, s)] = s;
  high[AT(r, s)] = s
#else
  low[AT(r, s)] = s;
  high[AT(r, s)] = s;
  flag[AT(r, s)] = s
#endif
}

inline read_payload(q, s) {
  assert(low[AT(q, s)] == s);
  assert(high[AT(q, s)] == s)
}

proctype rank(byte r) {
  byte s = 1, q;
  do
  :: publish(r, s);
     q = 0;
     do
     :: q == RANKS -> break
     :: q == r -> q++
     :: q < RANKS && q != r ->
#ifdef BUG_ROOT_WAITS_FOR_NOBODY
        if
        :: r == 0
        :: r != 0 -> flag[AT(q, s)] == s; read_payload(q, s)
        fi;
#else
        flag[AT(q, s)] == s;
        read_payload(q, s);
#endif
        q++
     od;
     s = (s + 1) % MODULUS
  od
}

init {
  byte i;
  atomic { for (i : 0 .. RANKS - 1) { run rank(i) } }
}
