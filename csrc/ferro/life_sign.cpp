#include "ferro/life_sign.hpp"

#include <sched.h>

#include "ferro/background_thread.hpp"
#include "ferro/parking.hpp"

namespace ferro {
namespace {

constexpr double kLongSeconds = 3600.0;  // nothing happens when it is over

}  // namespace

bool kernel_notices_deaths() noexcept {
  robust_list_head* list = nullptr;
  std::size_t nbytes = 0;
  // Registers this thread's own list once more, which changes nothing.
  return syscall(SYS_get_robust_list, 0, &list, &nbytes) == 0 &&
         syscall(SYS_set_robust_list, list, nbytes) == 0;
}

LifeSign::LifeSign(std::atomic<std::uint32_t>& word) : word_(word) {
  thread_ = start_thread("ferro-lifesign", [this] { hold(); });
  while (phase_.load(std::memory_order_acquire) == kStarting) sched_yield();
}

LifeSign::~LifeSign() {
  phase_.store(kLeaving, std::memory_order_release);
  futex_wake_all(phase_);
  thread_.join();
}

// Replaces this thread's list of robust futexes, which is empty: the C library
// keeps one per thread for its own robust mutexes, and this thread takes none.
void LifeSign::hold() noexcept {
  entry_.next = &list_.list;
  list_.list.next = &entry_;
  list_.futex_offset = reinterpret_cast<char*>(&word_) - reinterpret_cast<char*>(&entry_);
  list_.list_op_pending = nullptr;
  syscall(SYS_set_robust_list, &list_, sizeof list_);
  // FUTEX_WAITERS always: it is what makes the kernel wake somebody.
  word_.store(static_cast<std::uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS, std::memory_order_seq_cst);
  futex_wake_all(word_);
  phase_.store(kHeld, std::memory_order_release);

  while (phase_.load(std::memory_order_acquire) != kLeaving) futex_wait(phase_, kHeld, kLongSeconds);

  word_.store(0, std::memory_order_seq_cst);
  list_.list.next = &list_.list;
  futex_wake_all(word_);
}

}  // namespace ferro
