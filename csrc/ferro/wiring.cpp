// Builds a Communicator from what connects its ranks.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "ferro/communicator.hpp"
#include "ferro/shm_channel.hpp"
#include "ferro/shm_transport.hpp"

namespace ferro {
namespace {

int index_of(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

// A group of threads, or of processes that all share `segment`.
std::shared_ptr<Communicator> Communicator::over_memory(int rank, const std::vector<int>& ranks,
                                                        const std::shared_ptr<Segment>& segment, int num_cores,
                                                        bool are_processes) {
  const int index = index_of(ranks, rank);
  const auto size = static_cast<int>(ranks.size());
  Parts parts;
  parts.transport = std::make_unique<ShmTransport>(segment, index, ranks, num_cores, are_processes);
  std::vector<std::unique_ptr<Channel>> channels(ranks.size());
  for (int peer = 0; peer < size; ++peer)
    if (peer != index) channels[peer] = std::make_unique<ShmChannel>(segment, index, peer, ranks[peer]);
  parts.messenger = std::make_unique<Messenger>(*parts.transport, std::move(channels), segment, index,
                                                SpinPolicy::for_ranks(size, num_cores));
  parts.heap = std::make_shared<Heap>(segment, index);
  return std::shared_ptr<Communicator>(new Communicator(rank, size, std::move(parts)));
}

std::vector<std::shared_ptr<Communicator>> Communicator::create_group(int world_size, int num_cores) {
  const std::shared_ptr<Segment> segment = Segment::create(world_size);
  std::vector<int> ranks(world_size);
  for (int rank = 0; rank < world_size; ++rank) ranks[rank] = rank;
  std::vector<std::shared_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank)
    group.push_back(over_memory(rank, ranks, segment, num_cores, false));
  return group;
}

std::shared_ptr<Communicator> Communicator::connect(const Wiring& wiring) {
  const auto num_local = static_cast<int>(wiring.local_ranks.size());
  const std::shared_ptr<Segment> segment =
      num_local > 1 ? Segment::map_file(wiring.segment_fd, num_local) : Segment::create(1);
  return over_memory(wiring.rank, wiring.local_ranks, segment, wiring.num_cores, true);
}

}  // namespace ferro
