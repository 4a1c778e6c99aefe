/* Long messages: the sender stages pieces in the ring, the receiver may take over the rest and read it
 * where it stands, or give it back if it cannot.
 *
 * Claims: every piece of every message arrives once and in order; what is read in place is the message
 * and not what the sender puts into its array afterwards, even if it gives up midway; a send ends whether
 * or not there is a receiver, as long as the ring has room; nor need one that found nothing more to read come
 * back (LEAVES: a receive that nobody asks for).
 *
 * Memory is sequentially consistent here; sleeping and waking are those of threads.pml.
 */
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef PIECES
#define PIECES 3
#endif
#ifndef ROOM
#define ROOM 2 /* pieces in the ring */
#endif
#define CELLS 2
#define CELL(m) ((m) % CELLS)
#define PIECE(m, piece) ((m) * PIECES + (piece) + 1)
#define NOT_A_MESSAGE 255

byte flag;            /* messages published */
byte messages_read;
byte entered[CELLS];  /* pieces that the sender puts into the ring */
bool is_taken[CELLS]; /* one word with `entered` */
byte ring[ROOM], written, consumed;
byte array;           /* the message that stands in the sender's array */
bool has_given_up;

/* Compare and swap: enters one more piece unless the receiver has taken over. */
inline enter(m, done, may_stage) {
#ifdef BUG_LOOKS_THEN_ENTERS
  may_stage = !is_taken[CELL(m)];
  if
  :: may_stage -> entered[CELL(m)] = done + 1
  :: else
  fi
#else
  atomic {
#ifdef BUG_ENTERS_WITHOUT_LOOKING
    may_stage = true;
#else
    may_stage = !is_taken[CELL(m)];
#endif
    if
    :: may_stage -> entered[CELL(m)] = done + 1
    :: else
    fi
  }
#endif
}

inline give_up() {
#ifdef BUG_ARRAY_REUSED_FIRST
  array = NOT_A_MESSAGE;
  has_given_up = true;
#else
  has_given_up = true;
  array = NOT_A_MESSAGE;
#endif
  goto end
}

active proctype sender() {
  byte m, done;
  bool may_stage;
  do
  :: m == MESSAGES -> break
  :: m < MESSAGES ->
#ifndef BUG_CELL_REUSED
     m - messages_read < CELLS;
#endif
     array = m;
     d_step { entered[CELL(m)] = 0; is_taken[CELL(m)] = false };
     flag = m + 1;
     done = 0;
     do
     :: done == PIECES -> break
     :: done < PIECES && written - consumed < ROOM && !is_taken[CELL(m)] ->
        enter(m, done, may_stage);
        if
        :: may_stage ->
           ring[written % ROOM] = PIECE(m, done);
           written++;
           done++
        :: else
        fi
#ifdef BUG_RETURNS_ONCE_TAKEN
     :: is_taken[CELL(m)] -> break
#else
     :: messages_read == m + 1 -> break
#endif
#ifdef GIVES_UP
     :: give_up()
#endif
     od;
     array = NOT_A_MESSAGE;
     m++
  od;
end:
  skip
}

active proctype receiver() {
  byte m, got, ring_end, found;
  do
  :: m == MESSAGES -> break
  :: m < MESSAGES && has_given_up -> break
  :: m < MESSAGES && flag > m ->
     if
     :: ring_end = PIECES
     :: atomic {
#if defined(LEAVES) && !defined(BUG_TAKES_OVER_BY_HALVES)
          entered[CELL(m)] == written - consumed -> /* between two pieces */
#endif
          ring_end = entered[CELL(m)];
          is_taken[CELL(m)] = true
        }
     fi;
     got = 0;
     do
     :: got == PIECES -> break
     :: got < ring_end && consumed < written ->
        assert(ring[consumed % ROOM] == PIECE(m, got));
        consumed++;
        got++
     :: got < ring_end && consumed == written && has_given_up -> goto end
#ifdef LEAVES
     :: got < ring_end && consumed == written -> goto end
#endif
     :: got >= ring_end && got < PIECES ->
        if
        :: found = array;
#ifndef BUG_NO_SECOND_LOOK
           if
           :: has_given_up -> goto end
           :: else
           fi;
#endif
           assert(found == m);
           got++
        :: got == ring_end -> /* it cannot be read */
           ring_end = PIECES;
#ifndef BUG_KEPT_THOUGH_UNREADABLE
           is_taken[CELL(m)] = false
#endif
        fi
     od;
     m++;
     messages_read = m
  od;
end:
  skip
}
