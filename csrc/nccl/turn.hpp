// The turn of one call on the communicators that it uses.
#ifndef FERRO_NCCL_TURN_HPP
#define FERRO_NCCL_TURN_HPP

#include <mutex>
#include <vector>

#include "nccl/communicator.hpp"

namespace ferro::nccl {

// While it lives, the devices are locked, except inside settle(), and nothing else calls
// the communicators but abort().
class Turn {
 public:
  // Throws if the communicator has failed, ended, or belongs to another process.
  Turn(Communicator& communicator, const char* function, Patience& patience)
      : communicator_(&communicator), function_(function), patience_(patience) {
    lock();
  }
  // Communicators are distinct.
  Turn(const std::vector<Communicator*>& communicators, const char* function, Patience& patience);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Waits while `result` is ncclInProgress; throws for an error. An error that the library
  // remembers, a timeout or an interruption ends the communicators: what is thrown then is the first
  // one's first error.
  void settle(ncclResult_t result) {
    if (result != ncclSuccess) settle_slowly(result);
  }
  // Waits until NCCL has made `child`, or failed to, which the child itself will tell: ncclCommGrow goes on
  // with the connections of the parent, whose state is ncclSuccess meanwhile.
  void await_child(Communicator& child);

 private:
  void lock();
  bool try_lock();
  void unlock();
  bool is_any_busy() const;
  void check_all() const;
  void settle_slowly(ncclResult_t result);
  ncclResult_t await_all();
  ncclResult_t await(Communicator& communicator);
  void set_busy(bool busy);
  Error failure(ncclResult_t result);
  [[noreturn]] void end_all(const Error& error);
  bool try_fail_all(const Error& error);

  template <typename Visit>
  void for_each(Visit visit) const {
    if (others_.empty()) return visit(*communicator_);
    for (Communicator* each : others_) visit(*each);
  }

  Communicator* const communicator_;
  const std::vector<Communicator*> others_;  // all of them if there are several
  std::vector<std::mutex*> locks_;           // of their devices, each once, in an order that all threads keep
  const char* const function_;
  Patience& patience_;
  bool is_locked_ = false;
  bool has_set_busy_ = false;
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_TURN_HPP
