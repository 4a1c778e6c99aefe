// Who is missing, once a wait has taken too long.
//
// The rank that is waited for may itself be waiting for another. So each rank that
// was waiting when the group ended says for whom (behind its last words over TCP, in
// its control block in shared memory), and listens for a moment to what the others
// say. Missing are those that are waited for and do not wait themselves. A rank that
// says nothing has stopped, is busy elsewhere, or comes only now. If all of them wait,
// some may wait for each other.
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
// Words used here and by the transports:
//   awaited    those for which a rank waits
//   missing    those at which the waits of all ranks end, or who wait for each other
//   stuck      said of a rank that waits, and can do nothing else until its wait is over
//   note       to write down who is awaited while the group is well, for whoever gives up later
//   testimony  what a rank says, once, of whom it awaited when the group ended
//   inquest    the time after the end for which ranks listen to testimonies
// For calls on GPUs, csrc/nccl has words of its own: attendance, deserter and quitter in attendance.hpp,
// witness and doubt in first_error.hpp.
#ifndef FERRO_TESTIMONY_HPP
#define FERRO_TESTIMONY_HPP

#include <bitset>
#include <map>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/error.hpp"

namespace ferro {

// Ranks of the group. Two facts travel in the same set, so that whoever hands it on hands them on too:
// - in a set of missing ranks, kDeadlock says that they wait for each other;
// - in a testimony, the rank that testifies names itself if it is stuck.
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

// What is known of the waits of some ranks, and of why they ended.
class Testimonies {
 public:
  // What `rank` testifies: empty if it awaited nobody, with `rank` itself if it is stuck.
  void add(int rank, RankSet awaited) {
    heard_.set(rank);
    const bool is_stuck = awaited.test(rank);
    awaited.reset(rank);
    if (awaited.none()) return;
    stuck_[rank] = is_stuck;
    waiting_[rank] = awaited;
    awaited_ |= awaited;
  }
  void add(const AbortReason& reason) {
    if (reason.is_set() && precedes(reason, reason_)) reason_ = reason;
  }
  std::size_t num_heard() const { return heard_.count(); }
  bool has_heard(int rank) const { return heard_.test(rank); }
  // Those that are waited for and do not wait themselves. But if the waits of the rank that gave up
  // lead to none of these, and into a circle of stuck ranks, that circle and kDeadlock.
  RankSet missing() const {
    RankSet idle = awaited_;
    for (const auto& waiting : waiting_) idle.reset(waiting.first);
    const RankSet behind = ranks_behind(reason_.reporter);
    if ((behind & idle).any()) return idle;
    for (const int rank : ranks_of(behind)) {
      const RankSet circle = circle_behind(rank);
      if (circle.any()) return circle;
    }
    return idle;
  }
  AbortReason reason() const { return reason_; }

 private:
  // Those for which it waits, those for which these wait, and so on.
  RankSet ranks_behind(int rank) const {
    RankSet behind;
    for (std::vector<int> next{rank}; !next.empty();) {
      const auto waiting = waiting_.find(next.back());
      next.pop_back();
      if (waiting == waiting_.end()) continue;
      for (const int awaited : ranks_of(waiting->second & ~behind)) next.push_back(awaited);
      behind |= waiting->second;
    }
    return behind;
  }
  // Goes from a stuck rank to the first for which it waits, until it meets one that it has passed: that
  // one is in a circle, which the second loop goes round once. Empty, if it meets one that is not stuck.
  RankSet circle_behind(int rank) const {
    RankSet passed, circle;
    for (; stuck_.test(rank) && !passed.test(rank); rank = ranks_of(waiting_.at(rank)).front())
      passed.set(rank);
    for (; passed.test(rank) && !circle.test(rank); rank = ranks_of(waiting_.at(rank)).front())
      circle.set(rank);
    if (circle.any()) circle.set(kDeadlock);
    return circle;
  }

  RankSet heard_, awaited_, stuck_;
  std::map<int, RankSet> waiting_;  // whom each of them awaits
  AbortReason reason_;
};

}  // namespace ferro

#endif  // FERRO_TESTIMONY_HPP
