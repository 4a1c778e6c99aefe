#include "ferro/watchdog.hpp"

#include <sched.h>

#include "ferro/background_thread.hpp"
#include "ferro/parking.hpp"

namespace ferro {
namespace {

// A word is looked at again this often even if nobody wakes us. Every event comes with
// a wake of its own, so this only bounds the damage should one be lost.
constexpr double kRecheckSeconds = 1.0;

}  // namespace

bool kernel_notices_deaths() noexcept {
  robust_list_head* list = nullptr;
  std::size_t nbytes = 0;
  // Registers this thread's own list once more, which changes nothing.
  return syscall(SYS_get_robust_list, 0, &list, &nbytes) == 0 &&
         syscall(SYS_set_robust_list, list, nbytes) == 0;
}

Watchdog::Watchdog(std::shared_ptr<Segment> segment, int place, std::vector<int> members)
    : segment_(std::move(segment)), place_(place), members_(std::move(members)), is_dead_(members_.size()) {
  thread_ = start_thread("ferro-watchdog", [this] { watch(); });
  while (!is_registered_.load(std::memory_order_acquire)) sched_yield();
}

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
  register_thread();
  int target = next_to_watch();
  while (!is_stopping_.load(std::memory_order_seq_cst)) {
    if (await_change(target)) {
      is_dead_[target] = true;
      segment_->abort({ErrorCode::peer_lost, members_[target], members_[place_], 0});
      // One death ends the group, but those that form its successor must learn of the next one, too.
    }
    target = next_to_watch();
  }
  unregister_thread();
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

// Replaces this thread's list of robust futexes, which is empty: the C library
// keeps one per thread for its own robust mutexes, and this thread takes none.
void Watchdog::register_thread() {
  std::atomic<std::uint32_t>& word = segment_->control(place_).liveness;
  robust_entry_.next = &robust_list_.list;
  robust_list_.list.next = &robust_entry_;
  robust_list_.futex_offset = reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(&robust_entry_);
  robust_list_.list_op_pending = nullptr;
  syscall(SYS_set_robust_list, &robust_list_, sizeof robust_list_);
  // FUTEX_WAITERS always: it is what makes the kernel wake somebody.
  word.store(static_cast<std::uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS, std::memory_order_seq_cst);
  futex_wake_all(word);
  is_registered_.store(true, std::memory_order_release);
}

void Watchdog::unregister_thread() {
  std::atomic<std::uint32_t>& word = segment_->control(place_).liveness;
  word.store(0, std::memory_order_seq_cst);
  robust_list_.list.next = &robust_list_.list;
  futex_wake_all(word);
}

}  // namespace ferro
