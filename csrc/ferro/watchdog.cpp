#include "ferro/watchdog.hpp"

#include <sched.h>

#include "ferro/background_thread.hpp"
#include "ferro/parking.hpp"

namespace ferro {
namespace {

// A word is looked at again this often even if nobody wakes us. Every event comes with
// a wake of its own, so this only bounds the damage should one be lost.
constexpr double kRecheckSeconds = 1.0;

// What sched_getattr(2) and sched_setattr(2) exchange. Not every C library declares it, and the
// kernel's header for it contradicts some of those that do.
struct SchedulingAttributes {
  std::uint32_t size = sizeof(SchedulingAttributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime_ns = 0;
  std::uint64_t deadline_ns = 0;
  std::uint64_t period_ns = 0;
};

// Lets this thread, which runs for microseconds at a time, do so as soon as it is woken. The kernel
// may wake it where the dying process gives its memory back, which otherwise ends its own slice of
// milliseconds first. From Linux 6.12 on, a thread with shorter slices may interrupt one with longer
// ones. Earlier ones, or a sandbox, leave all as it is.
void ask_for_short_slices() noexcept {
  SchedulingAttributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;  // the user has decided otherwise
  attributes.runtime_ns = 100'000;               // the shortest that there is
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Segment> segment, int place, std::vector<int> members)
    : segment_(std::move(segment)),
      place_(place),
      members_(std::move(members)),
      life_sign_(segment_->control(place).liveness),
      is_dead_(members_.size()),
      thread_(start_thread("ferro-watchdog", [this] { watch(); })) {}

Watchdog::~Watchdog() {
  is_stopping_.store(true, std::memory_order_seq_cst);
  // The thread may be between its look at is_stopping_ and its sleep: wake until it has gone.
  while (!has_stopped_.load(std::memory_order_acquire)) {
    const int target = watched_.load(std::memory_order_acquire);
    if (target >= 0) futex_wake_all(segment_->control(target).liveness);
    sched_yield();
  }
  thread_.join();
}

void Watchdog::watch() noexcept {
  ask_for_short_slices();
  int target = next_to_watch();
  while (!is_stopping_.load(std::memory_order_seq_cst)) {
    if (await_change(target)) {
      is_dead_[target] = true;
      segment_->abort({ErrorCode::peer_lost, members_[target], members_[place_], 0});
      // One death ends the group, but those that form its successor must learn of the next one, too.
    }
    target = next_to_watch();
  }
  has_stopped_.store(true, std::memory_order_release);
}

bool Watchdog::await_change(int target) {
  RankControl& control = segment_->control(target);
  watched_.store(target, std::memory_order_seq_cst);
  const std::uint32_t word = control.liveness.load(std::memory_order_acquire);
  if ((word & FUTEX_OWNER_DIED) != 0) return true;
  if (!is_stopping_.load(std::memory_order_seq_cst)) futex_wait(control.liveness, word, kRecheckSeconds);
  return control.is_dead();
}

int Watchdog::next_to_watch() const {
  for (int step = 1; step < segment_->size(); ++step) {
    const int candidate = (place_ + step) % segment_->size();
    const RankControl& control = segment_->control(candidate);
    // Departed and released: until then it may still be killed, and its own watchdog may still
    // sleep on the word that we would sleep on next, where the kernel wakes only one of us.
    const bool has_gone = control.has_left() && control.liveness.load(std::memory_order_acquire) == 0;
    if (!has_gone && !is_dead_[candidate]) return candidate;
  }
  return place_;
}

}  // namespace ferro
