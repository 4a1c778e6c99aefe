// A call that a progress thread runs while its caller goes on.
#ifndef FERRO_TASK_HPP
#define FERRO_TASK_HPP

#include <algorithm>
#include <atomic>
#include <chrono>
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
  Task(const Collective& call, int world_size, double seconds) : collective(call), timeout_s(seconds) {
    if (call.send_counts == nullptr) return;
    send_counts_.assign(call.send_counts, call.send_counts + world_size);
    recv_counts_.assign(call.recv_counts, call.recv_counts + world_size);
    collective.send_counts = send_counts_.data();
    collective.recv_counts = recv_counts_.data();
  }
  Task(Op op, const std::vector<PointToPoint>& ops, double seconds)
      : messages(std::make_unique<Batch>(ops)), timeout_s(seconds) {
    collective.op = op;
  }

  bool is_done() const { return state_.load(std::memory_order_acquire) == kDone; }

  // Blocks until the task is done. False if the caller's time ran out before.
  bool wait(Call& call) {
    for (int i = 0; i < SpinPolicy::kBriefPauses && !is_done(); ++i) pause_briefly();
    if (is_done()) return true;
    call.begin_blocking();
    while (!is_done()) {
      if (call.is_expired()) return false;
      call.check_interrupt();
      const double slice = std::chrono::duration<double>(kWaitSlice).count();
      std::uint32_t state = kPending;
      if (!state_.compare_exchange_strong(state, kAwaited) && state == kDone) break;
      futex_wait(state_, kAwaited, std::max(0.0, std::min(slice, call.remaining_s())));
    }
    return true;
  }

  // Once done: throws what the task did.
  void rethrow() const {
    if (error_ != nullptr) throw *error_;
  }

  void finish(std::unique_ptr<Error> error) {
    error_ = std::move(error);
    if (state_.exchange(kDone, std::memory_order_seq_cst) == kAwaited) futex_wake_all(state_);
  }

  Collective collective;  // the op alone, if there are messages
  std::unique_ptr<Batch> messages;
  const double timeout_s;
  // Its place among the collectives or exchanges, once it has begun: messages may have been
  // posted by who submitted them.
  std::optional<std::uint64_t> sequence;

 private:
  static constexpr std::uint32_t kPending = 0, kAwaited = 1, kDone = 2;

  std::vector<std::size_t> send_counts_, recv_counts_;
  std::unique_ptr<Error> error_;
  std::atomic<std::uint32_t> state_{kPending};
};

}  // namespace ferro

#endif  // FERRO_TASK_HPP
