// Who is missing, where ranks share memory: each finds in the others' control blocks for whom they wait. See
// testimony.hpp.
#include <sched.h>

#include <algorithm>

#include "ferro/clock.hpp"
#include "ferro/shm_transport.hpp"

namespace ferro {

// The rank whose reason won has first said for whom it waited.
RankSet ShmTransport::find_missing() {
  const AbortReason reason = aborted();
  if (std::find(members_.begin(), members_.end(), reason.reporter) == members_.end()) return {};
  const RankControl& control = segment_->control(place_of_[reason.reporter]);
  return control.has_testified.load(std::memory_order_acquire) != 0 ? control.awaited : RankSet{};
}

// While headers are missing, the ranks that owe them, or that keep those from coming; later, the one
// that is waited for.
void ShmTransport::add_awaited(RankSet& ranks) const {
  for (std::uint64_t awaited = awaited_.load(std::memory_order_relaxed); awaited != kNobody;) {
    const std::uint32_t sequence = sequence_of(awaited);
    RankSet missing;
    for (int peer = 0; peer < size_; ++peer) {
      const HeaderSlot& slot = segment_->header(peer, sequence & 1);
      if (sequence_of(slot.flag.load(std::memory_order_acquire)) != sequence)
        missing.set(static_cast<std::size_t>(members_[culprit_behind(peer)]));
    }
    if (missing.none()) missing.set(static_cast<std::size_t>(members_[static_cast<std::uint32_t>(awaited)]));
    // By now the wait may be over, if it is another thread's, and the slots may be in use again. The loads
    // above acquire what came before such a use, so the next one sees that awaited_ has changed.
    const std::uint64_t now = awaited_.load(std::memory_order_relaxed);
    if (now == awaited) {
      ranks |= missing;
      return;
    }
    awaited = now;
  }
}

void ShmTransport::testify(const RankSet& awaited) noexcept {
  RankControl& control = segment_->control(place_);
  if (awaited.none() || control.is_testifying.exchange(1, std::memory_order_acq_rel) != 0) return;
  control.awaited = awaited;
  control.has_testified.store(1, std::memory_order_release);
}

void ShmTransport::note_awaited_in_messages(const Call& call, const RankSet& awaited) noexcept {
  if (!holds_up_rank(call)) return;
  std::uint32_t word = kAwake;
  if (awaited.any()) {
    while (!awaited.test(static_cast<std::size_t>(members_[word++]))) continue;
    word |= RankControl::kInMessages;
  }
  segment_->control(place_).stuck_for.store(word, std::memory_order_relaxed);
}

void ShmTransport::note_several_callers() noexcept {
  segment_->control(place_).has_several_callers.store(1, std::memory_order_relaxed);
}

void ShmTransport::trace(const Call& call, Error& error) const {
  Testimonies testimonies;
  testimonies.add({error.code, error.peer, members_[place_], 0});
  RankSet awaited;
  for (const int rank : error.missing) awaited.set(static_cast<std::size_t>(rank));
  awaited[static_cast<std::size_t>(members_[place_])] = holds_up_rank(call);
  testimonies.add(members_[place_], awaited);
  const Clock::time_point start = Clock::now();
  for (const int rank : error.missing) {
    for (int peer = place_of_[rank]; !testimonies.has_heard(members_[peer]);) {
      const int next = stuck_for(peer, start);
      if (next < 0) break;
      RankSet stuck;
      stuck.set(static_cast<std::size_t>(members_[peer])).set(static_cast<std::size_t>(members_[next]));
      testimonies.add(members_[peer], stuck);
      peer = next;
    }
  }
  const RankSet missing = testimonies.missing();
  if (missing.none()) return;
  error.awaited = error.missing;
  name_missing(error, missing);
}

void ShmTransport::add_testimonies(Testimonies& testimonies) {
  testimonies.add(aborted());
  for (int peer = 0; peer < size_; ++peer) {
    const RankControl& control = segment_->control(peer);
    if (control.has_testified.load(std::memory_order_acquire) != 0)
      testimonies.add(members_[peer], control.awaited);
  }
}

// A peer that sleeps waits for another one, which its word names: whoever holds it
// up holds us up, too.
int ShmTransport::culprit_behind(int peer) const {
  for (int step = 0; step < size_; ++step) {
    const std::uint32_t word = segment_->collective_sleeper(peer).load(std::memory_order_relaxed);
    if (word == kAwake || word > static_cast<std::uint32_t>(size_) || static_cast<int>(word) - 1 == place_)
      break;
    peer = static_cast<int>(word) - 1;
  }
  return peer;
}

// Whether this rank can do nothing else until the call ends: where the ranks are processes, others than its
// main thread may wait while the rank itself is at work.
bool ShmTransport::holds_up_rank(const Call& call) const {
  return !call.is_in_background() && (!are_processes_ || is_main_thread()) &&
         segment_->control(place_).has_several_callers.load(std::memory_order_relaxed) == 0;
}

// For whom a peer waits, if it is stuck; else -1. A peer may have noted a wait and yet be awake: either
// what it waited for has woken it, or it is between two slices of its sleep. The latter is not rare, since
// many begin to wait at once and give up after a whole number of slices. So this looks again, until one slice
// after `start`, whether the peer sleeps.
int ShmTransport::stuck_for(int peer, Clock::time_point start) const {
  const RankControl& control = segment_->control(peer);
  do {
    if (control.has_several_callers.load(std::memory_order_relaxed) != 0) return -1;
    const std::uint32_t word = control.stuck_for.load(std::memory_order_relaxed);
    const std::uint32_t place_plus_one = word & ~RankControl::kInMessages;
    if (place_plus_one == kAwake || place_plus_one > static_cast<std::uint32_t>(size_)) return -1;
    const bool sleeps = (word & RankControl::kInMessages) != 0
                            ? segment_->message_sleeper(peer).load(std::memory_order_relaxed) == kAnyPeer
                            : segment_->collective_sleeper(peer).load(std::memory_order_relaxed) == word;
    if (sleeps) return static_cast<int>(place_plus_one) - 1;
    sched_yield();
  } while (std::chrono::duration<double>(Clock::now() - start).count() < kWaitSliceSeconds);
  return -1;
}

}  // namespace ferro
