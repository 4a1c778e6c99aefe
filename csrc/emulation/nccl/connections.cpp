#include "emulation/nccl/connections.hpp"

#include <algorithm>

namespace emulation {

Connections::Connections(Communicator& communicator, const std::vector<Operation>& operations)
    : communicator_(communicator), own_(communicator.segment().part(communicator.rank)) {
  for (const Operation& operation : operations) {
    if (!operation.is_collective() || operation.count > 0) add(operation);
  }
  announce();
}

void Connections::add(const Operation& operation) {
  const int root = operation.peer;
  switch (operation.kind) {
    case Kind::send:
      return send_to(operation.peer);
    case Kind::recv:
      return receive_from(operation.peer);
    case Kind::all_to_all:  // these three NCCL makes out of messages
      return for_each_other([&](int rank) { send_to(rank), receive_from(rank); });
    case Kind::gather:
      if (communicator_.rank != root) return send_to(root);
      return for_each_other([&](int rank) { receive_from(rank); });
    case Kind::scatter:
      if (communicator_.rank != root) return receive_from(root);
      return for_each_other([&](int rank) { send_to(rank); });
    case Kind::put:
    case Kind::signal:
    case Kind::wait_signal:
      return meet_all(&RankPart::has_put);
    default:
      return meet_all(&RankPart::has_reduced);
  }
}

template <class Visit>
void Connections::for_each_other(Visit visit) {
  for (int rank = 0; rank < communicator_.num_ranks; ++rank) {
    if (rank != communicator_.rank) visit(rank);
  }
}

void Connections::meet_all(Flag RankPart::* flag) {
  (own_.*flag).store(1, std::memory_order_release);
  for_each_other([&](int rank) { awaited_.push_back(&(communicator_.segment().part(rank).*flag)); });
}

void Connections::send_to(int peer) {
  Flag& own = own_.sends_to[peer];
  if (peer == communicator_.rank || own.load(std::memory_order_relaxed) != 0) return;
  directions_[peer].emplace_back(&own, &communicator_.segment().part(peer).receives_from[communicator_.rank]);
}

void Connections::receive_from(int peer) {
  Flag& own = own_.receives_from[peer];
  if (peer == communicator_.rank || own.load(std::memory_order_relaxed) != 0) return;
  directions_[peer].emplace_back(&own, &communicator_.segment().part(peer).sends_to[communicator_.rank]);
}

// A flag tells how many directions are connected together with its own.
void Connections::announce() {
  for (auto& [peer, directions] : directions_) {
    std::sort(directions.begin(), directions.end());
    directions.erase(std::unique(directions.begin(), directions.end()), directions.end());
    for (const auto& [own, other] : directions) {
      own->store(static_cast<std::uint32_t>(directions.size()), std::memory_order_release);
      awaited_.push_back(other);
    }
  }
  communicator_.segment().ring();
}

void Connections::await() {
  communicator_.segment().await([this] { return have_come(); }, communicator_.stop());
}

bool Connections::have_come() const {
  require_alike();
  return std::all_of(awaited_.begin(), awaited_.end(),
                     [](const Flag* flag) { return flag->load(std::memory_order_acquire) != 0; });
}

// Two ranks opposite each other, as any two alone are, send each other one message for all that they connect
// at once: NCCL does not take one that is longer than its own.
void Connections::require_alike() const {
  for (const auto& [peer, directions] : directions_) {
    if (2 * (peer - communicator_.rank) % communicator_.num_ranks != 0) continue;
    for (const auto& [own, other] : directions) {
      require(other->load(std::memory_order_acquire) <= directions.size(), ncclInternalError,
              "Message truncated: rank ", peer, " connects both directions to rank ", communicator_.rank,
              " at once, and this one connects them one after the other");
    }
  }
}

}  // namespace emulation
