// Lets the kernel tell others that this process has ended.
//
// A thread holds a robust futex: a word with the thread's id, which the kernel marks, waking one
// waiter, when the thread ends for whatever reason. That happens before the memory of a dying process
// is torn down, which takes long for gigabytes, and a forked child that holds the same descriptors
// does not delay it.
//
// The thread does nothing else. It may be the last of its process to end, and then it is the one that
// gives the memory back. With the short slices of a watchdog, it would do so before all whom it woke.
//
// The kernel's side: Documentation/locking/robust-futex-ABI.rst.
#ifndef FERRO_LIFE_SIGN_HPP
#define FERRO_LIFE_SIGN_HPP

#include <linux/futex.h>

#include <atomic>
#include <cstdint>
#include <thread>

namespace ferro {

// Whether it can work here: the kernel, or a sandbox, may refuse robust futexes. Then deaths are found by
// timeouts alone.
bool kernel_notices_deaths() noexcept;

class LifeSign {
 public:
  // The word belongs to others from now on, who read it and sleep on it. Returns once it is held.
  explicit LifeSign(std::atomic<std::uint32_t>& word);
  // Sets the word to zero, and wakes all who sleep on it.
  ~LifeSign();
  LifeSign(const LifeSign&) = delete;
  LifeSign& operator=(const LifeSign&) = delete;

 private:
  static constexpr std::uint32_t kStarting = 0, kHeld = 1, kLeaving = 2;

  void hold() noexcept;

  std::atomic<std::uint32_t>& word_;
  robust_list_head list_{};
  robust_list entry_{};
  std::atomic<std::uint32_t> phase_{kStarting};
  std::thread thread_;
};

}  // namespace ferro

#endif  // FERRO_LIFE_SIGN_HPP
