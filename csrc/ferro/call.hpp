// What a blocking call carries with it: its deadline, and hooks into the
// language that made it.
#ifndef FERRO_CALL_HPP
#define FERRO_CALL_HPP

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "ferro/clock.hpp"
#include "ferro/error.hpp"

namespace ferro {

// The caller's side of a wait. The engine knows no Python; through these hooks a
// caller that holds an interpreter lock releases it and learns of signals.
struct Hooks {
  // Called once, before the first wait or piece of work that may exceed about
  // a microsecond.
  void (*begin_blocking)(void* state) noexcept = nullptr;
  // Called at least every 100 ms after begin_blocking. True ends the call with
  // ErrorCode::interrupted.
  bool (*interrupted)(void* state) noexcept = nullptr;
  void* state = nullptr;
};

constexpr double kUnlimited = 1e9;  // seconds

// The longest that a blocked call sleeps before it checks signals, its deadline
// and the group's state again.
constexpr double kWaitSliceSeconds = 0.1;

// A rank that checks none of these for longer than this, in a call that blocks, was stopped or starved.
constexpr double kAbsenceSeconds = 0.6;

// Asks the kernel once: that costs as much as a short wait.
inline bool is_main_thread() {
  static thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  return is_main;
}

// One call in progress. Lives on the caller's stack or in its Task.
class Call {
 public:
  explicit Call(double timeout_s, Hooks hooks = {}) : timeout_s_(timeout_s), hooks_(hooks) {}

  // Tells the caller that this may take longer than a microsecond. Idempotent.
  void begin_blocking() {
    if (is_blocking_) return;
    is_blocking_ = true;
    started_ = present_since_ = last_seen_ = Clock::now();
    if (hooks_.begin_blocking != nullptr) hooks_.begin_blocking(hooks_.state);
  }

  // The clock starts with begin_blocking: what came before is at most a
  // microsecond, and reading the clock would cost a tiny call a third of its time.
  bool is_expired() const { return is_blocking_ && elapsed_s() >= timeout_s_; }
  double elapsed_s() const { return is_blocking_ ? seconds_between(started_, Clock::now()) : 0.0; }
  double remaining_s() const { return timeout_s_ - elapsed_s(); }
  double timeout_s() const { return timeout_s_; }
  // How long it may sleep before it must check again.
  double slice_s() const { return std::clamp(remaining_s(), 0.0, kWaitSliceSeconds); }
  void extend(double seconds) { timeout_s_ += seconds; }

  // For a call whose caller goes on meanwhile.
  void set_in_background() { is_in_background_ = true; }
  bool is_in_background() const { return is_in_background_; }

  // How long since the last absence (kAbsenceSeconds), 0 during one. check_interrupt() records
  // presence: where it is called too rarely, the gaps count as absences.
  double present_s() const {
    const Clock::time_point now = Clock::now();
    return is_absence(last_seen_, now) ? 0.0 : seconds_between(present_since_, now);
  }

  // Throws Error{interrupted} if a signal handler of the caller raised.
  void check_interrupt() {
    note_presence();
    if (hooks_.interrupted == nullptr) return;
    const bool is_interrupted = hooks_.interrupted(hooks_.state);
    note_presence();  // the hook may have waited for an interpreter lock
    if (is_interrupted) throw Error(ErrorCode::interrupted);
  }
  // The same for code that comes by often: mostly it costs only a clock reading, whereas the
  // hook may have to wait for an interpreter lock.
  void check_interrupt_if_due() {
    if (seconds_between(last_seen_, Clock::now()) >= kCheckIntervalSeconds) check_interrupt();
  }
  // For use between two pieces of long local work. No peer is waited for, so a timeout here
  // blames nobody.
  void check_at_work() {
    begin_blocking();
    check_interrupt_if_due();
    if (is_expired()) throw Error(ErrorCode::timeout);
  }

 private:
  static constexpr double kCheckIntervalSeconds = 0.05;

  static double seconds_between(Clock::time_point earlier, Clock::time_point later) {
    return std::chrono::duration<double>(later - earlier).count();
  }
  static bool is_absence(Clock::time_point from, Clock::time_point to) {
    return seconds_between(from, to) > kAbsenceSeconds;
  }
  void note_presence() {
    const Clock::time_point now = Clock::now();
    if (is_absence(last_seen_, now)) present_since_ = now;
    last_seen_ = now;
  }

  double timeout_s_;
  Hooks hooks_;
  bool is_blocking_ = false;
  bool is_in_background_ = false;
  Clock::time_point started_;
  Clock::time_point present_since_;
  Clock::time_point last_seen_;
};

}  // namespace ferro

#endif  // FERRO_CALL_HPP
