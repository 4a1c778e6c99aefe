#include "nccl/first_error.hpp"

#include <chrono>
#include <new>
#include <utility>

namespace ferro::nccl {
namespace {

// How long an error of NCCL's waits for the witness. The kernel closes a dead process's sockets about when it
// tells the host's side of the death; on a busy machine either may be heard of some scheduling rounds later.
// Not as long as the engine's watchdog may sleep (kRecheckSeconds): that bounds what a lost wake-up would
// cost, which would cost a name here, while every error that no rank's end is behind would take as long.
constexpr std::chrono::milliseconds kWitnessGrace{500};

// Whether it may be due to another rank's end. One that dies breaks connections, or leaves NCCL half a
// message to read.
bool may_be_anothers(const Error& error) {
  return error.kind == ErrorKind::nccl &&
         (error.result == ncclRemoteError || error.result == ncclSystemError ||
          error.result == ncclInternalError);
}

}  // namespace

void FirstError::hear(Witness witness) {
  auto shared = witness ? std::make_shared<const Witness>(std::move(witness)) : nullptr;
  const std::lock_guard<std::mutex> lock(lock_);
  witness_ = std::move(shared);
}

void FirstError::ask_witness_of(const FirstError& other) {
  auto shared = other.witness();
  const std::lock_guard<std::mutex> lock(lock_);
  witness_ = std::move(shared);
}

std::shared_ptr<const FirstError::Witness> FirstError::witness() const {
  const std::lock_guard<std::mutex> lock(lock_);
  return witness_;
}

void FirstError::check() const {
  if (!exists()) return;
  const std::lock_guard<std::mutex> lock(lock_);
  throw error_;
}

void FirstError::keep(const Error& error) noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  if (exists_.load(std::memory_order_relaxed)) return;
  try {
    error_ = error;
  } catch (const std::bad_alloc&) {
    error_ = Error(error.kind, error.function, error.result);
  }
  error_.is_fatal = true;
  exists_.store(true, std::memory_order_release);  // last: whoever sees it may read error_
}

bool FirstError::try_keep(const Error& error, bool may_wait) noexcept {
  if (exists()) return true;
  const auto known = may_be_anothers(error) ? witness() : nullptr;
  if (known != nullptr) {
    const bool is_late = !may_wait || is_too_late_to_wait();  // first: what it learns last still counts
    Error named = (*known)();
    if (named.kind == ErrorKind::none && !is_late) return false;
    if (named.kind != ErrorKind::none) {
      if (*named.function == '\0') named.function = error.function;
      keep(named);
    }
  }
  keep(error);
  return true;
}

// Whoever meets the error waits for the same moment.
bool FirstError::is_too_late_to_wait() noexcept {
  const auto now = Patience::Clock::now();
  const std::lock_guard<std::mutex> lock(lock_);
  if (doubt_begin_ == Patience::Clock::time_point{}) doubt_begin_ = now;
  is_doubted_.store(true, std::memory_order_release);
  return now - doubt_begin_ >= kWitnessGrace;
}

}  // namespace ferro::nccl
