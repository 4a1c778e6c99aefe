// Lets one thread at a time into a group: a lock that obeys the caller's deadline,
// lets go of the interpreter's lock while it waits, and costs two atomic
// instructions when nobody has to wait.
//
// The states are those of Drepper, "Futexes Are Tricky", mutex 2.
#ifndef FERRO_GATE_HPP
#define FERRO_GATE_HPP

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <mutex>

#include "ferro/call.hpp"
#include "ferro/parking.hpp"

namespace ferro {

class Gate {
 public:
  class Pass {
   public:
    Pass(Gate& gate, Call& call) : gate_(gate) { gate_.enter(call); }
    Pass(Gate& gate, std::adopt_lock_t) : gate_(gate) {}  // entered already
    ~Pass() { gate_.leave(); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    Gate& gate_;
  };

  // Lets the thread that is inside step out for a moment. Whoever waits gets in before it returns.
  class Leave {
   public:
    explicit Leave(Gate& gate) : gate_(gate) { gate_.leave(); }
    ~Leave() {
      gate_.let_in();
      Call unhurried(kUnlimited);
      gate_.enter(unhurried);
    }
    Leave(const Leave&) = delete;
    Leave& operator=(const Leave&) = delete;

   private:
    Gate& gate_;
  };

  // For the few callers that cannot use a Pass.
  void enter(Call& call) {
    if (!try_enter()) enter_slowly(call);
  }
  bool try_enter() {
    std::uint32_t state = kFree;
    if (!state_.compare_exchange_strong(state, kTaken, std::memory_order_acquire)) return false;
    owner_.store(pthread_self(), std::memory_order_relaxed);
    return true;
  }

  void leave() {
    owner_.store(pthread_t{}, std::memory_order_relaxed);
    if (state_.exchange(kFree, std::memory_order_release) == kAwaited) futex_wake_all(state_);
  }
  // Whether this thread is inside. If so, a signal handler is asking, which would wait for itself.
  bool is_mine() const { return owner_.load(std::memory_order_relaxed) == pthread_self(); }
  static Error reentered() {
    return Error(ErrorCode::unsupported, -1,
                 "this thread is inside a call of the same group, which a signal handler has interrupted. "
                 "Let the handler only set a flag, and make the call when the interrupted one has returned");
  }
  // For the thread inside: whether another one wants to get in. Informs, orders nothing.
  bool is_awaited() const { return num_waiting_.load(std::memory_order_relaxed) != 0; }

 private:
  static constexpr std::uint32_t kFree = 0, kTaken = 1, kAwaited = 2;
  // A waiter has been woken and gets in within a few yields, unless a signal handler of its own
  // runs first.
  static constexpr int kMaxYields = 1000;

  struct Waiting {
    explicit Waiting(Gate& gate) : gate(gate) { gate.num_waiting_.fetch_add(1, std::memory_order_relaxed); }
    ~Waiting() { gate.num_waiting_.fetch_sub(1, std::memory_order_relaxed); }
    Gate& gate;
  };

  __attribute__((noinline)) void enter_slowly(Call& call) {
    if (is_mine()) throw reentered();
    call.begin_blocking();
    const Waiting waiting(*this);
    while (state_.exchange(kAwaited, std::memory_order_acquire) != kFree) {
      if (call.is_expired())
        throw Error(ErrorCode::timeout, -1, "another thread of this rank is inside a call of the same group");
      call.check_interrupt();
      futex_wait(state_, kAwaited, call.slice_s());
    }
    owner_.store(pthread_self(), std::memory_order_relaxed);
  }

  void let_in() {
    for (int i = 0; i < kMaxYields && is_awaited() && state_.load(std::memory_order_relaxed) == kFree; ++i)
      sched_yield();
  }

  std::atomic<std::uint32_t> state_{kFree};
  // Written only by the thread inside. A thread only ever asks whether it names itself, for which no
  // order matters.
  std::atomic<pthread_t> owner_{};
  std::atomic<int> num_waiting_{0};
};

}  // namespace ferro

#endif  // FERRO_GATE_HPP
