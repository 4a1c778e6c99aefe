// Who is missing, once a wait has taken too long.
//
// The rank that is waited for may itself be waiting for another. So each rank that
// was waiting when the group ended says for whom (behind its last words over TCP, in
// its control block in shared memory), and listens for a moment to what the others
// say. Missing is who is waited for and does not wait. Who says nothing has stopped,
// is elsewhere, or comes only now.
//
// Over TCP several may give up at one moment, none knowing of the others. What they say
// meets everywhere, and the same of it counts on every rank: see precedes(). Where all
// share memory one is the first, and all tell what it says.
//
// Rejected: to ask before giving up. A stream takes no question in the middle of a
// payload, so each rank would need a socket and a thread more, to answer; last words
// may stand anywhere, and are sent in any case. Rejected as well: that the first to
// give up decides for all. It knows only its own wait, and what it finds out later
// would have to travel over streams that it has ended.
#ifndef FERRO_TESTIMONY_HPP
#define FERRO_TESTIMONY_HPP

#include <bitset>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/error.hpp"

namespace ferro {

using RankSet = std::bitset<kMaxWorldSize + 2>;

// How long after the end of the group ranks listen to each other. Long enough for who
// sleeps in slices of kWaitSliceSeconds, short enough for "timeout + 1 s".
constexpr double kInquestSeconds = 0.5;
// Who has been in a call for less than this when it hears of the end counts as late, not
// as waiting: it may be the very rank that was missing.
constexpr double kPresenceSeconds = 1e-3;
// So does who has just come back: the others were waiting for it.
static_assert(kAbsenceSeconds >= kInquestSeconds + kWaitSliceSeconds,
              "who was there when the group ended has told it in time");

inline std::vector<int> ranks_of(const RankSet& set) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kMaxWorldSize; ++rank)
    if (set.test(static_cast<std::size_t>(rank))) ranks.push_back(rank);
  return ranks;
}

// Whether of two reasons for which a group ended the first is the one to tell: whatever is known
// for certain comes before a wait that was given up, then the lowest reporter.
inline bool precedes(const AbortReason& reason, const AbortReason& other) {
  if (reason.code == ErrorCode::none || other.code == ErrorCode::none) return other.code == ErrorCode::none;
  const bool is_timeout = reason.code == ErrorCode::timeout;
  if (is_timeout != (other.code == ErrorCode::timeout)) return !is_timeout;
  return reason.reporter < other.reporter;
}

// What is known of the waits of some ranks, and of why they ended.
class Testimonies {
 public:
  // Of a rank that was waiting for nobody, `awaited` is empty.
  void add(int rank, const RankSet& awaited) {
    heard_.set(static_cast<std::size_t>(rank));
    if (awaited.none()) return;
    waiting_.set(static_cast<std::size_t>(rank));
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
