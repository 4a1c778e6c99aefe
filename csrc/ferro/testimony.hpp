// Who is missing, once a wait has taken too long.
//
// The rank that is waited for may itself be waiting for another. So each rank that
// was waiting when the group ended says for whom (behind its last words over TCP, in
// its control block in shared memory), and listens for a moment to what the others
// say. Missing are those to whom the waits lead and who do not wait themselves. A rank
// that says nothing has stopped, is busy elsewhere, or comes only now. If all of them
// wait, some may wait for each other.
//
// Over TCP several ranks may give up at the same moment, none knowing of the others.
// What they say reaches every rank, and the same one of them counts everywhere: see
// precedes(). Where all share memory, one is the first: it finds in the others' control
// blocks for whom they wait, and all report what it says.
//
// Rejected: asking before giving up. A question cannot be sent in the middle of a
// payload, so each rank would need one more socket, and a thread to answer; last words
// may stand anywhere, and are sent in any case. Also rejected: that the first to give
// up decides for all. It knows only its own wait, and what it finds out later would
// have to travel over streams that it has ended.
//
// A rank's program, its collectives and its messages go on independently of each other, so what counts is for
// which of them of another rank somebody waits. A message of a rank comes when its program sends it: that
// waits for others only in a call that blocks it. A collective waits for the collectives of other ranks, in
// the background or not; and for their programs, where they have yet to begin theirs.
//
// Words used here and by the transports:
//   awaited    those for which a rank waits
//   program    of a rank: its main thread or, where ranks are threads, the one that makes calls. Of a rank
//              that makes calls from several, nobody knows which of them the others wait for: it never waits
//   missing    those at which the waits lead to an end, or who wait for each other
//   stuck      said of a rank whose program waits, and for nothing that may be on its way
//   note       to write down who is awaited while the group is well, for whoever gives up later
//   testimony  what a rank says, once, of whom it awaited when the group ended
//   inquest    the time after the end for which ranks listen to testimonies
// For calls on GPUs, csrc/nccl has words of its own: attendance, deserter and quitter in attendance.hpp,
// witness and doubt in first_error.hpp.
#ifndef FERRO_TESTIMONY_HPP
#define FERRO_TESTIMONY_HPP

#include <bitset>
#include <cstddef>
#include <map>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/error.hpp"

namespace ferro {

// Ranks of the group. In a set of missing ranks, kDeadlock says that they wait for each other; it travels
// in the set so that whoever hands that on hands it on, too.
using RankSet = std::bitset<kMaxWorldSize + 2>;  // a whole number of words, with room for kDeadlock
constexpr std::size_t kDeadlock = kMaxWorldSize;

// How long after the end of the group ranks listen to each other. Long enough for a rank that
// sleeps in slices of kWaitSliceSeconds, short enough to raise within a second of the timeout.
constexpr double kInquestSeconds = 0.5;
// A rank that has been in a call for less than this when it hears of the end counts as late,
// not as waiting: it may be the very rank that was missing.
constexpr double kPresenceSeconds = 1e-3;
// So does a rank that has just come back from an absence: the others were waiting for it.
static_assert(kAbsenceSeconds >= kInquestSeconds + kWaitSliceSeconds,
              "a rank that was present when the group ended has said so in time");

inline std::vector<int> ranks_of(const RankSet& set) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kMaxWorldSize; ++rank)
    if (set.test(rank)) ranks.push_back(rank);
  return ranks;
}

inline RankSet set_of(const std::vector<int>& ranks) {
  RankSet set;
  for (const int rank : ranks) set.set(static_cast<std::size_t>(rank));
  return set;
}

// Names in an error those that are missing. Its peer stays if there are none.
inline void name_missing(Error& error, const RankSet& missing) {
  error.missing = ranks_of(missing);
  error.is_deadlock = missing.test(kDeadlock);
  if (!error.missing.empty()) error.peer = error.missing.front();
}

// Of two reasons why a group ended, whether the first is the one to report: what is known for
// certain comes before a wait that was given up, then the lowest reporter.
inline bool precedes(const AbortReason& reason, const AbortReason& other) {
  if (!reason.is_set() || !other.is_set()) return !other.is_set();
  const bool is_timeout = reason.code == ErrorCode::timeout;
  if (is_timeout != (other.code == ErrorCode::timeout)) return !is_timeout;
  return reason.reporter < other.reporter;
}

// What a rank testifies: empty if it awaits nobody.
struct Testimony {
  RankSet in_collective;              // for whom its collective waits, in the background or not
  RankSet in_messages;                // for whose messages its program waits, or to take its own
  RankSet given_up;                   // the same of the call that it has given up, in the background or not
  bool is_in_collective = false;      // one is under way, even if it waits for nobody just now
  bool waits_for_collective = false;  // its program does; then one is under way
  bool is_stuck = false;              // then its program waits for somebody

  // The first for which its program waits, if it is stuck.
  int first_awaited() const;
  bool is_empty() const { return in_collective.none() && in_messages.none() && given_up.none(); }

  // As it travels: one byte, then one bit for each rank and set.
  static std::size_t nbytes(int world_size) { return 1 + kNumSets * set_nbytes(world_size); }
  void pack(int world_size, char* bytes) const;
  static Testimony unpack(int world_size, const char* bytes);

 private:
  static constexpr std::size_t kNumSets = 3;
  static std::size_t set_nbytes(int world_size) { return (static_cast<std::size_t>(world_size) + 7) / 8; }
};

// What is known of the waits of some ranks, and of why they ended.
class Testimonies {
 public:
  void add(int rank, const Testimony& testimony);
  void add(const AbortReason& reason) {
    if (reason.is_set() && precedes(reason, reason_)) reason_ = reason;
  }
  std::size_t num_heard() const { return heard_.count(); }
  bool has_heard(int rank) const { return heard_.test(static_cast<std::size_t>(rank)); }
  // Where the wait leads that the first rank has given up: the ranks that do not wait themselves or, if it
  // leads to none, a circle of stuck ranks, with kDeadlock. If there is none either, those at which any
  // wait ends.
  RankSet missing() const;
  AbortReason reason() const { return reason_; }

 private:
  // What is awaited of some ranks: that their programs go on, or their collectives.
  struct Awaited {
    RankSet programs, collectives;

    RankSet ranks() const { return programs | collectives; }
  };
  const Testimony& of(int rank) const;
  Awaited given_up() const;
  Awaited all_awaited() const;
  RankSet ends_of(Awaited& awaited) const;
  bool ends_at_program(int rank, Awaited& awaited) const;
  bool ends_at_collective(int rank, Awaited& awaited) const;
  RankSet circle_behind(int rank, RankSet& cleared) const;

  RankSet heard_;
  RankSet in_collectives_;  // for whom anybody waits in a collective
  std::map<int, Testimony> waiting_;
  AbortReason reason_;
};

}  // namespace ferro

#endif  // FERRO_TESTIMONY_HPP
