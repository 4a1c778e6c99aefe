// How long a call waits for NCCL, and what it listens to meanwhile.
#ifndef FERRO_NCCL_PATIENCE_HPP
#define FERRO_NCCL_PATIENCE_HPP

#include <algorithm>
#include <chrono>
#include <thread>

#include "nccl/error.hpp"

namespace ferro::nccl {

class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  // Runs the caller's signal handlers; true if one raised.
  using Interrupted = bool (*)(void* context);

  Patience() = default;
  explicit Patience(double timeout_s, Interrupted interrupted = nullptr, void* context = nullptr)
      : timeout_s_(timeout_s), interrupted_(interrupted), context_(context) {}

  // Ends the wait, too, once `alarm`, the caller's, tells that a rank is gone.
  void heed(const Alarm* alarm) { alarm_ = alarm; }
  const Alarm* alarm() const { return alarm_; }  // null if there is none

  // Adds what else is known to the error of a wait that took too long.
  using Complete = void (*)(const void* context, Error& error);
  void complete_with(Complete complete, const void* context) {
    complete_ = complete;
    complete_context_ = context;
  }

  // For the first 100 microseconds lets other threads run; then sleeps 20 microseconds, and twice as
  // long each time, up to a millisecond. Call it without a lock. The clock starts with the first
  // pause: a call that need not wait never reads it.
  void pause(const char* function) {
    const Clock::time_point now = Clock::now();
    if (begin_ == Clock::time_point{}) begin_ = listened_ = now;
    const double elapsed_s = std::chrono::duration<double>(now - begin_).count();
    if (elapsed_s >= timeout_s_) throw timed_out(function, elapsed_s);
    if (now - listened_ > kBetweenSignals) {
      listened_ = now;
      listen(function, now);
    }
    if (now - begin_ < kYielding) return std::this_thread::yield();
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, kLongest);
  }

 private:
  // NCCL carries out each call of a non-blocking communicator in a thread that it starts for it. That
  // takes less time than a sleep, which the kernel prolongs by its timer slack.
  static constexpr std::chrono::microseconds kYielding{100};
  static constexpr std::chrono::microseconds kShortest{20};
  static constexpr std::chrono::microseconds kLongest{1000};
  static constexpr std::chrono::milliseconds kBetweenSignals{100};
  static constexpr std::chrono::milliseconds kToBeDone{500};

  void listen(const char* function, Clock::time_point now) {
    if (interrupted_ != nullptr && interrupted_(context_)) throw Error(ErrorKind::interrupted, function);
    if (alarm_ == nullptr) return;
    const Loss loss = (*alarm_)();
    if (loss.rank < 0) return;
    if (lost_ == Clock::time_point{}) lost_ = now;
    // A rank that lives may have left because it was done, as this one will soon be, too.
    if (loss.is_dead || now - lost_ > kToBeDone) throw error_of_loss(loss, function);
  }

  Error timed_out(const char* function, double elapsed_s) const {
    Error error(ErrorKind::timeout, function);
    error.elapsed_s = elapsed_s;
    if (complete_ != nullptr) complete_(complete_context_, error);
    return error;
  }

  double timeout_s_ = 0;
  Interrupted interrupted_ = nullptr;
  void* context_ = nullptr;
  const Alarm* alarm_ = nullptr;
  Complete complete_ = nullptr;
  const void* complete_context_ = nullptr;
  std::chrono::microseconds sleep_ = kShortest;
  Clock::time_point begin_;
  Clock::time_point listened_;
  Clock::time_point lost_;  // when a rank was first found to be gone
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_PATIENCE_HPP
