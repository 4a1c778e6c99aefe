// What a group needs before it is launched: that the ranks which its operations connect for the first time
// have all come. A real NCCL meets them on the host, and so a call may not return before they make theirs.
#ifndef EMULATION_NCCL_CONNECTIONS_HPP
#define EMULATION_NCCL_CONNECTIONS_HPP

#include <atomic>
#include <map>
#include <utility>
#include <vector>

#include "emulation/nccl/operation.hpp"

namespace emulation {

class Connections {
 public:
  // Says that this rank has come. The communicator outlives it.
  Connections(Communicator& communicator, const std::vector<Operation>& operations);
  // Waits for the others; throws Interrupted when the communicator is aborted.
  void await();

 private:
  using Flag = std::atomic<std::uint32_t>;

  void add(const Operation& operation);
  template <class Visit>
  void for_each_other(Visit visit);
  void meet_all(Flag RankPart::* flag);
  void send_to(int peer);
  void receive_from(int peer);
  void announce();
  bool have_come() const;
  void require_alike() const;

  Communicator& communicator_;
  RankPart& own_;
  // New directions of messages, by peer: what this rank says, and what it waits for.
  std::map<int, std::vector<std::pair<Flag*, const Flag*>>> directions_;
  std::vector<const Flag*> awaited_;
};

}  // namespace emulation

#endif  // EMULATION_NCCL_CONNECTIONS_HPP
