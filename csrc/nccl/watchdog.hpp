// The threads that notice errors which no call has met: a peer's death while this rank
// computes, a network that broke under a transfer on the GPU.
//
// There are two, since a question to CUDA may have to wait while another thread waits for room
// in a stream, which is what a peer that hangs leads to. One looks at clocks and alarms and
// asks CUDA nothing; the other asks which calls are done.
#ifndef FERRO_NCCL_WATCHDOG_HPP
#define FERRO_NCCL_WATCHDOG_HPP

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "nccl/lane.hpp"

namespace ferro::nccl {

class Watchdog {
 public:
  // The only one: it lives as long as the process does.
  static Watchdog& instance();

  // Looks after each until it has ended or nobody else holds it.
  void watch(const std::shared_ptr<Communicator>& communicator);
  void watch(const std::shared_ptr<Lane>& lane);
  // Calls `hook` after a look that found calls done, whose arrays may then go. It runs on a thread of
  // the watchdog's, and must take no locks.
  void on_done(void (*hook)());
  // What is watched and has not ended.
  std::vector<std::shared_ptr<Communicator>> watched();
  // Ends the threads. For the interpreter's exit.
  void stop() noexcept;

 private:
  using Look = void (Watchdog::*)();

  void work(Look look) noexcept;
  void start();  // under lock_
  void look_after_all();
  void observe_all();
  std::vector<std::shared_ptr<Lane>> lanes();

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Communicator>> communicators_;  // under lock_
  std::vector<std::weak_ptr<Lane>> lanes_;                  // under lock_
  void (*hook_)() = nullptr;                                // under lock_
  bool is_stopping_ = false;                                // under lock_
  std::thread guard_;                                       // under lock_ until it is joined
  std::thread observer_;                                    // the same
};

// Watchdog::on_done of the only one.
inline void on_done(void (*hook)()) { Watchdog::instance().on_done(hook); }

// At the interpreter's exit, while other libraries are still whole: ends all that is left
// and all threads. A forked child has none of them, and leaves its parent's alone.
void shut_down(double grace_s) noexcept;

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_WATCHDOG_HPP
