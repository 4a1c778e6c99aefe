// Notices that a rank of this host died, and says so to all.
//
// Each rank has one thread that holds a robust futex in the segment: a word with
// the thread's id, which the kernel marks, waking one waiter, when the thread
// ends for whatever reason. That happens before the memory of a dying process
// is torn down, so it takes no longer for a rank with gigabytes resident, and a
// forked child that holds the same descriptors does not delay it. The ranks
// watch each other in a ring, each its next neighbour that is neither dead nor departed.
//
// The kernel's side: Documentation/locking/robust-futex-ABI.rst.
#ifndef FERRO_WATCHDOG_HPP
#define FERRO_WATCHDOG_HPP

#include <linux/futex.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "ferro/segment.hpp"

namespace ferro {

// Whether it can work here: the kernel, or a sandbox, may refuse robust futexes. Then deaths are found by
// timeouts alone.
bool kernel_notices_deaths() noexcept;

class Watchdog {
 public:
  // Returns once this rank itself can be watched.
  Watchdog(std::shared_ptr<Segment> segment, int place, std::vector<int> members);
  // The rank has departed: stops watching, and sends its own watcher on to the next rank.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch() noexcept;
  void register_thread();
  void unregister_thread();
  // The next place in the ring that has neither departed nor been reported dead;
  // place_ if there is none.
  int next_to_watch() const;
  // Sleeps until something about `target` may have changed. True if it died.
  bool await_change(int target);

  std::shared_ptr<Segment> segment_;
  const int place_;
  const std::vector<int> members_;
  std::vector<bool> is_dead_;  // reported by this watchdog, whose thread alone uses it
  robust_list_head robust_list_{};
  robust_list robust_entry_{};
  std::atomic<int> watched_{-1};
  std::atomic<bool> is_registered_{false};
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> has_stopped_{false};
  std::thread thread_;
};

}  // namespace ferro

#endif  // FERRO_WATCHDOG_HPP
