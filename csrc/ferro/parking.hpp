// How a rank waits for memory that a peer will write: spin, yield, sleep.
//
// A sleeper stores in its word for whom it waits, passes a full fence, and
// looks once more at what it waits for and at the abort word before the kernel
// puts it to sleep, which it only does while the word is still as stored. A
// publisher stores its flag, passes a full fence, and looks at the words. One of
// the two must see the other's store: no wake-up is lost. tests/model checks this.
#ifndef FERRO_PARKING_HPP
#define FERRO_PARKING_HPP

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace ferro {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` does nothing on most cores
#endif
}

// How long to spin before sleeping. Chosen from the number of ranks and cores:
// where ranks outnumber cores, spinning keeps the very peer that is waited for
// from running.
struct SpinPolicy {
  static constexpr int kBriefPauses = 24;  // about a microsecond: cheaper than telling the caller
  int pauses;
  int yields;
  int pauses_per_mib = 0;  // more of them while a peer moves so much

  static SpinPolicy for_ranks(int num_ranks, int num_cores) {
    return num_ranks <= num_cores ? SpinPolicy{2000, 20, 4096} : SpinPolicy{20, 10};
  }

  // For a wait that lasts until a peer has moved `nbytes`: up to about three times as long as that takes.
  SpinPolicy while_moving(std::size_t nbytes) const {
    const auto mib = static_cast<int>(std::min(nbytes >> 20, std::size_t{16}));
    return {pauses + mib * pauses_per_mib, yields};
  }

  // For the `turn`-th time in a row that nothing could be done: waits a little; false if it is time to sleep.
  bool linger(int turn) const {
    if (turn >= pauses + yields) return false;
    turn < pauses ? pause_briefly() : static_cast<void>(sched_yield());
    return true;
  }
};

// Not FUTEX_PRIVATE: the word is shared between processes. Returns upon a wake, a
// signal or the time limit, or at once if the word no longer holds `expected`.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, double seconds) {
  timespec limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}
inline void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

// A sleeper's word: kAwake, kAnyPeer, or parked_for() the rank that it waits for. The sleeper sets it;
// whoever publishes what it waits for, or aborts, makes it kAwake again.
constexpr std::uint32_t kAwake = 0;
constexpr std::uint32_t kAnyPeer = ~std::uint32_t{0};
constexpr std::uint32_t parked_for(int place) { return static_cast<std::uint32_t>(place) + 1; }

// Whether a sleeper with this word waits for the rank at `place`.
inline bool is_parked_for(std::uint32_t word, int place) {
  return word == parked_for(place) || word == kAnyPeer;
}

// Clears a sleeper's word and wakes it. The exchange leaves the task to one of several wakers. It is
// sequentially consistent for those who do not look at the word first, and whose fence it is.
inline void unpark(std::atomic<std::uint32_t>& word) {
  if (word.exchange(kAwake, std::memory_order_seq_cst) != kAwake) futex_wake_all(word);
}

}  // namespace ferro

#endif  // FERRO_PARKING_HPP
