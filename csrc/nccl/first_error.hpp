// The error for which all later calls of a communicator fail: the first one.
//
// NCCL's errors name no rank. Where a witness may know whose end is behind a lost connection, NCCL's word for
// it is kept only if the witness has named nobody for a while.
#ifndef FERRO_NCCL_FIRST_ERROR_HPP
#define FERRO_NCCL_FIRST_ERROR_HPP

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "nccl/error.hpp"
#include "nccl/patience.hpp"

namespace ferro::nccl {

class FirstError {
 public:
  // Says whose end is behind an error, by one that names the rank; ErrorKind::none while it knows of
  // nobody's. May be asked from any thread, and keeps nothing alive. Null where nobody knows.
  using Witness = std::function<Error()>;
  void hear(Witness witness);
  // Asks the witness that `other` asks.
  void ask_witness_of(const FirstError& other);

  bool exists() const noexcept { return exists_.load(std::memory_order_acquire); }
  // Throws it if there is one.
  void check() const;
  // Keeps `error` unless there is one.
  void keep(const Error& error) noexcept;
  // As keep(), but what NCCL says of a lost connection waits for the witness, if there is one, which may be
  // about to learn whose end it was, and gives way to what it says. False while it is waited for: try again
  // soon. Unless `may_wait`, it is only asked. No lock may be held.
  bool try_keep(const Error& error, bool may_wait) noexcept;
  // Whether NCCL has told of an error, and the witness is waited for.
  bool is_in_doubt() const noexcept { return is_doubted_.load(std::memory_order_acquire) && !exists(); }

 private:
  std::shared_ptr<const Witness> witness() const;
  bool is_too_late_to_wait() noexcept;

  mutable std::mutex lock_;
  Error error_;                              // under lock_, as the next two
  std::shared_ptr<const Witness> witness_;   // shared, as it is asked without the lock
  Patience::Clock::time_point doubt_begin_;  // when NCCL first told of an error
  std::atomic<bool> is_doubted_{false};
  std::atomic<bool> exists_{false};
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_FIRST_ERROR_HPP
