// Who is missing, once a wait has taken too long.
//
// The rank that is waited for may itself be waiting for another. So each rank that
// was waiting when the group ended says for whom (behind its last words over TCP, in
// its control block in shared memory), and listens for a moment to what the others
// say. Missing are those that are waited for and do not wait themselves. A rank that
// says nothing has stopped, is busy elsewhere, or comes only now.
//
// Over TCP several ranks may give up at the same moment, none knowing of the others.
// What they say reaches every rank, and the same one of them counts everywhere: see
// precedes(). Where all share memory, one is the first, and all report what it says.
//
// Rejected: asking before giving up. A question cannot be sent in the middle of a
// payload, so each rank would need one more socket, and a thread to answer; last words
// may stand anywhere, and are sent in any case. Also rejected: that the first to give
// up decides for all. It knows only its own wait, and what it finds out later would
// have to travel over streams that it has ended.
#ifndef FERRO_TESTIMONY_HPP
#define FERRO_TESTIMONY_HPP

#include <bitset>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/error.hpp"

namespace ferro {

using RankSet = std::bitset<kMaxWorldSize + 2>;

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

// Of two reasons why a group ended, whether the first is the one to report: what is known for
// certain comes before a wait that was given up, then the lowest reporter.
inline bool precedes(const AbortReason& reason, const AbortReason& other) {
  if (reason.code == ErrorCode::none || other.code == ErrorCode::none) return other.code == ErrorCode::none;
  const bool is_timeout = reason.code == ErrorCode::timeout;
  if (is_timeout != (other.code == ErrorCode::timeout)) return !is_timeout;
  return reason.reporter < other.reporter;
}

// What is known of the waits of some ranks, and of why they ended.
class Testimonies {
 public:
  // `awaited` is empty for a rank that was waiting for nobody.
  void add(int rank, const RankSet& awaited) {
    heard_.set(rank);
    if (awaited.none()) return;
    waiting_.set(rank);
    awaited_ |= awaited;
  }
  void add(const AbortReason& reason) {
    if (reason.code != ErrorCode::none && precedes(reason, reason_)) reason_ = reason;
  }
  std::size_t num_heard() const { return heard_.count(); }
  RankSet missing() const { return awaited_ & ~waiting_; }
  AbortReason reason() const { return reason_; }

 private:
  RankSet heard_, waiting_, awaited_;
  AbortReason reason_;
};

}  // namespace ferro

#endif  // FERRO_TESTIMONY_HPP
