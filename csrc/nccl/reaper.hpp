// The threads that end communicators, and give back what nobody holds any more.
//
// A Python object may be collected in the middle of anything, even between a group's
// start and its end on the same thread, where a call of NCCL would be queued or wait for
// itself. So whatever must be given back to NCCL goes to threads that are never in a group.
//
// Each communicator ends on a thread of its own: NCCL's calls may wait for other ranks,
// which may be threads of this very process, for graphs that hold the communicator, or hang.
// Whatever one of them does, no other is held up. Small things share a thread.
#ifndef FERRO_NCCL_REAPER_HPP
#define FERRO_NCCL_REAPER_HPP

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl/communicator.hpp"

namespace ferro::nccl {

class Reaper {
 public:
  // Does what it can without waiting; true once there is nothing left to do. Throws nothing.
  using Task = std::function<bool()>;

  // The only one: it lives as long as the process does.
  static Reaper& instance();

  // Refuses further calls of `communicator` and ends it, within `grace_s` if it is healthy.
  // If that has been asked for already, the shorter time counts.
  void end(std::shared_ptr<Communicator> communicator, double grace_s = kGrace) noexcept;
  // Runs `task` outside of any group, soon, and again until it returns true.
  void run(Task task) noexcept;
  // Ends what it has, and the threads; what comes later is left to the system, and so is a
  // thread that hangs in NCCL. For the interpreter's exit. Takes little more than `grace_s`.
  void stop(double grace_s) noexcept;
  bool is_stopping() noexcept;

  static constexpr double kGrace = 10;  // seconds

 private:
  struct Ending {
    std::shared_ptr<Communicator> communicator;
    Patience::Clock::time_point deadline;
  };

  void start_ending(const std::shared_ptr<Communicator>& communicator);  // under lock_, as the next
  void add_task(Task task);
  std::vector<Ending>::iterator find(const std::shared_ptr<Communicator>& communicator);
  bool advance(const std::shared_ptr<Communicator>& communicator) noexcept;
  void work() noexcept;
  bool is_over() const;  // under lock_

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<Ending> endings_;  // under lock_, as all below
  std::vector<Task> tasks_;
  bool is_working_ = false;  // the thread of the tasks runs
  bool is_stopping_ = false;
  Patience::Clock::time_point stops_by_;  // once is_stopping_
};

// Reaper::end, for a caller that gives up the last reference.
inline void end(std::shared_ptr<Communicator> communicator, double grace_s) noexcept {
  Reaper::instance().end(std::move(communicator), grace_s);
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_REAPER_HPP
