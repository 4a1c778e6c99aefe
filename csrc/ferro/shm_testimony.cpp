// Who is missing, where ranks share memory: each finds in the others' control blocks for whom they wait. See
// testimony.hpp.
#include <sched.h>

#include <algorithm>

#include "ferro/clock.hpp"
#include "ferro/shm_transport.hpp"

namespace ferro {
namespace {

// Of the numbers of two collectives of a group, which may have wrapped around.
bool is_before(std::uint32_t sequence, std::uint32_t other) {
  return static_cast<std::int32_t>(sequence - other) < 0;
}

}  // namespace

// The rank whose reason won has first said who is missing.
RankSet ShmTransport::find_missing() {
  const AbortReason reason = aborted();
  if (std::find(members_.begin(), members_.end(), reason.reporter) == members_.end()) return {};
  const RankControl& control = segment_->control(place_of_[reason.reporter]);
  return control.has_testified.load(std::memory_order_acquire) != 0 ? control.testimony.given_up : RankSet{};
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

// By now trace() has found those at whom the waits end.
void ShmTransport::testify(const Call&, const Error& error) noexcept {
  Testimony testimony;
  testimony.given_up = set_of(error.missing);
  testimony.given_up[kDeadlock] = error.is_deadlock;
  pass_on(testimony);
}

void ShmTransport::pass_on(const Testimony& testimony) noexcept {
  RankControl& control = segment_->control(place_);
  if (testimony.is_empty() || control.is_testifying.exchange(1, std::memory_order_acq_rel) != 0) return;
  control.testimony = testimony;
  control.has_testified.store(1, std::memory_order_release);
}

void ShmTransport::note_waiting_for_collective(const Call& call, bool is_waiting) noexcept {
  if (!holds_up_rank(call)) return;
  segment_->control(place_).is_waiting_for_collective.store(is_waiting ? 1 : 0, std::memory_order_relaxed);
}

void ShmTransport::note_awaited_in_messages(const Call& call, const RankSet& awaited) noexcept {
  if (!holds_up_rank(call)) return;
  std::uint32_t word = kAwake;
  if (awaited.any())
    while (!awaited.test(static_cast<std::size_t>(members_[word++]))) continue;
  segment_->control(place_).awaited_in_messages.store(word, std::memory_order_relaxed);
}

void ShmTransport::note_several_callers() noexcept {
  segment_->control(place_).has_several_callers.store(1, std::memory_order_relaxed);
}

// Asks each rank at which the waits seem to end what it waits for itself.
void ShmTransport::trace(const Call& call, Error& error) const {
  const Clock::time_point start = Clock::now();
  Testimonies testimonies;
  testimonies.add({error.code, error.peer, members_[place_], 0});
  testimonies.add(members_[place_], own_testimony(call, error, start));
  for (;;) {
    const RankSet missing = testimonies.missing();
    bool is_certain = true;
    for (const int rank : ranks_of(missing)) {
      if (testimonies.has_heard(rank)) continue;
      testimonies.add(rank, testimony_of(place_of_[rank], start));
      is_certain = false;
    }
    if (!is_certain) continue;
    if (missing.none()) return;
    error.awaited = error.missing;
    return name_missing(error, missing);
  }
}

void ShmTransport::add_testimonies(Testimonies& testimonies) {
  testimonies.add(aborted());
  for (int peer = 0; peer < size_; ++peer) {
    const RankControl& control = segment_->control(peer);
    if (control.has_testified.load(std::memory_order_acquire) != 0)
      testimonies.add(members_[peer], control.testimony);
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

// The collective whose header this rank has published last, 0 if none.
std::uint32_t ShmTransport::last_begun(int place) const {
  const std::uint32_t odd = sequence_of(segment_->header(place, 1).flag.load(std::memory_order_acquire));
  const std::uint32_t even = sequence_of(segment_->header(place, 0).flag.load(std::memory_order_acquire));
  return is_before(even, odd) ? odd : even;
}

// Whether a peer sleeps until this rank goes on in a collective that both have begun. It may be awake then,
// slow or stopped, or have been woken and not run since.
bool ShmTransport::holds_up_collective(int place) const {
  for (int peer = 0; peer < size_; ++peer)
    if (segment_->collective_sleeper(peer).load(std::memory_order_relaxed) == parked_for(place) &&
        !is_before(last_begun(place), last_begun(peer)))
      return true;
  return false;
}

// What this rank waits for that gives up `call`. Its program or, if that gives up, its collective may be
// asleep elsewhere.
Testimony ShmTransport::own_testimony(const Call& call, const Error& error, Clock::time_point start) const {
  const bool is_program = holds_up_rank(call);
  Testimony testimony = is_program ? waits_in_sleep(place_) : testimony_of(place_, start);
  const RankSet awaited = set_of(error.missing);
  if (is_message(error.op)) {
    testimony.given_up = awaited;
    if (is_program) testimony.in_messages = awaited;
  } else {
    testimony.in_collective = awaited;
    testimony.is_in_collective = true;
    testimony.waits_for_collective |= is_program;
  }
  testimony.is_stuck |= is_program && awaited.any();
  return testimony;
}

// What a rank waits for. It may have noted a wait and yet be awake: either what it waited for has woken it,
// or it is between two slices of its sleep. The latter is not rare, since many begin to wait at once and give
// up after a whole number of slices. So this looks again, until one slice after `start`, whether it sleeps.
Testimony ShmTransport::testimony_of(int place, Clock::time_point start) const {
  const RankControl& control = segment_->control(place);
  for (;;) {
    const Testimony testimony = waits_in_sleep(place);
    const bool has_noted = control.awaited_in_messages.load(std::memory_order_relaxed) != kAwake ||
                           control.is_waiting_for_collective.load(std::memory_order_relaxed) != 0;
    if (testimony.is_stuck || !has_noted ||
        control.has_several_callers.load(std::memory_order_relaxed) != 0 ||
        std::chrono::duration<double>(Clock::now() - start).count() >= kWaitSliceSeconds)
      return testimony;
    sched_yield();
  }
}

// What its words say for which it sleeps and, if it is its program that does, its notes.
Testimony ShmTransport::waits_in_sleep(int place) const {
  const RankControl& control = segment_->control(place);
  Testimony testimony;
  const auto add = [this](RankSet& ranks, const std::atomic<std::uint32_t>& word) {
    const std::uint32_t place_plus_one = word.load(std::memory_order_relaxed);
    if (place_plus_one != kAwake && place_plus_one <= static_cast<std::uint32_t>(size_))
      ranks.set(static_cast<std::size_t>(members_[place_plus_one - 1]));
  };
  add(testimony.in_collective, segment_->collective_sleeper(place));
  testimony.is_in_collective = testimony.in_collective.any() || holds_up_collective(place);
  if (control.has_several_callers.load(std::memory_order_relaxed) != 0) return testimony;
  testimony.waits_for_collective =
      testimony.in_collective.any() && control.is_waiting_for_collective.load(std::memory_order_relaxed) != 0;
  if (segment_->message_sleeper(place).load(std::memory_order_relaxed) == kAnyPeer)
    add(testimony.in_messages, control.awaited_in_messages);
  testimony.is_stuck = testimony.waits_for_collective || testimony.in_messages.any();
  return testimony;
}

}  // namespace ferro
