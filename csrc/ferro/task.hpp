// A call whose caller goes on meanwhile.
#ifndef FERRO_TASK_HPP
#define FERRO_TASK_HPP

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/messenger.hpp"
#include "ferro/parking.hpp"
#include "ferro/types.hpp"

namespace ferro {

class Task {
 public:
  // Copies the counts; the arrays stay the caller's, and must live until the task is done.
  Task(const Collective& what, int world_size, double timeout_s) : collective(what), call(timeout_s) {
    call.set_in_background();
    if (what.send_counts == nullptr) return;
    send_counts_.assign(what.send_counts, what.send_counts + world_size);
    recv_counts_.assign(what.recv_counts, what.recv_counts + world_size);
    collective.send_counts = send_counts_.data();
    collective.recv_counts = recv_counts_.data();
  }
  Task(Op op, const std::vector<PointToPoint>& ops, double timeout_s)
      : messages(std::make_unique<Batch>(ops)), call(timeout_s) {
    call.set_in_background();
    collective.op = op;
  }

  bool is_done() const { return state_.load(std::memory_order_acquire) == kDone; }

  // Blocks until the task is done. False if the caller's time ran out first or, after a slice, if nobody
  // attends to it.
  bool wait(Call& waiter) {
    for (int i = 0; i < SpinPolicy::kBriefPauses && !is_done(); ++i) pause_briefly();
    if (is_done()) return true;
    waiter.begin_blocking();
    while (!is_done()) {
      if (waiter.is_expired()) return false;
      waiter.check_interrupt();
      std::uint32_t state = kPending;
      if (!state_.compare_exchange_strong(state, kAwaited, std::memory_order_acquire) && state == kDone)
        break;
      futex_wait(state_, kAwaited, waiter.slice_s());
      if (is_unattended.load(std::memory_order_relaxed)) return is_done();
    }
    return true;
  }

  // Once done: throws what the task threw.
  void rethrow() const {
    if (error_) throw *error_;
  }

  // Allocates nothing: running out of memory must be reportable, too.
  void finish(std::optional<Error> error) noexcept {
    error_ = std::move(error);
    if (state_.exchange(kDone, std::memory_order_seq_cst) == kAwaited) futex_wake_all(state_);
  }

  Collective collective;  // the op alone, if there are messages
  std::unique_ptr<Batch> messages;
  Call call;  // of the thread that runs it
  // Its number among the collectives or exchanges, once it has begun. Written by the thread that begins it,
  // which may be the one that submits it; read by those that wait. Orders nothing.
  std::atomic<std::uint64_t> sequence{kNoSequence};
  bool has_begun() const { return sequence.load(std::memory_order_relaxed) != kNoSequence; }
  // When a progress thread had done it, by now_ns(); 0 if nobody looked at the clock, as for small tasks that
  // are no thread's. Written before it is done, read afterwards.
  std::int64_t ended_ns = 0;
  // It has begun, and is nobody's: whoever asks for it must do the rest, or hand it to the progress thread.
  // Written with the gate held.
  std::atomic<bool> is_unattended{false};

 private:
  static constexpr std::uint32_t kPending = 0, kAwaited = 1, kDone = 2;

  std::vector<std::size_t> send_counts_, recv_counts_;
  std::optional<Error> error_;
  std::atomic<std::uint32_t> state_{kPending};
};

}  // namespace ferro

#endif  // FERRO_TASK_HPP
