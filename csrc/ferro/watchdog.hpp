// Notices that a rank of this host died, and says so to all.
//
// Each rank gives a sign of life (life_sign.hpp), and has a thread that sleeps on another's. The ranks
// watch each other in a ring, each its next neighbour that is neither dead nor departed.
#ifndef FERRO_WATCHDOG_HPP
#define FERRO_WATCHDOG_HPP

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "ferro/life_sign.hpp"
#include "ferro/segment.hpp"

namespace ferro {

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
  // The next place in the ring that has neither departed nor been reported dead;
  // place_ if there is none.
  int next_to_watch() const;
  // Sleeps until something about `target` may have changed. True if it died.
  bool await_change(int target);

  std::shared_ptr<Segment> segment_;
  const int place_;
  const std::vector<int> members_;
  LifeSign life_sign_;
  std::vector<bool> is_dead_;  // reported by this watchdog, whose thread alone uses it
  std::atomic<int> watched_{-1};
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> has_stopped_{false};
  std::thread thread_;
};

}  // namespace ferro

#endif  // FERRO_WATCHDOG_HPP
