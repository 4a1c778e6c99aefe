// Builds a Communicator from what connects its ranks.
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "ferro/communicator.hpp"
#include "ferro/hosts_transport.hpp"
#include "ferro/shm_channel.hpp"
#include "ferro/shm_transport.hpp"
#include "ferro/tcp_channel.hpp"
#include "ferro/tcp_mesh.hpp"
#include "ferro/tcp_transport.hpp"
#include "ferro/unique_fd.hpp"

namespace ferro {
namespace {

using Channels = std::vector<std::unique_ptr<Channel>>;

int index_of(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The peers that share `segment` with this rank, in the order of `local_ranks`.
void connect_memory(Channels& channels, const std::shared_ptr<Segment>& segment,
                    const std::shared_ptr<PeerMemory>& peer_memory, const std::vector<int>& local_ranks,
                    int place) {
  for (int peer = 0; peer < static_cast<int>(local_ranks.size()); ++peer)
    if (peer != place)
      channels[local_ranks[peer]] =
          std::make_unique<ShmChannel>(segment, peer_memory, place, peer, local_ranks[peer]);
}

}  // namespace

std::vector<std::shared_ptr<Communicator>> Communicator::create_group(int world_size, int num_cores,
                                                                      PeerReads peer_reads) {
  const std::shared_ptr<Segment> segment = Segment::create(world_size);
  const std::vector<int> ranks = all_ranks(world_size);
  const SpinPolicy spin = SpinPolicy::for_ranks(world_size, num_cores);
  std::vector<std::shared_ptr<Communicator>> group;
  for (const int rank : ranks) {
    Parts parts;
    const auto peer_memory = std::make_shared<PeerMemory>(segment, rank, peer_reads);
    parts.transport = std::make_shared<ShmTransport>(segment, rank, ranks, spin, false, peer_memory);
    Channels channels(ranks.size());
    connect_memory(channels, segment, peer_memory, ranks, rank);
    parts.messenger = std::make_shared<Messenger>(parts.transport, std::move(channels), segment, rank, spin);
    parts.heap = std::make_shared<Heap>(segment, rank);
    group.push_back(std::shared_ptr<Communicator>(new Communicator(rank, world_size, std::move(parts))));
  }
  return group;
}

std::shared_ptr<Communicator> Communicator::connect(const Wiring& wiring) {
  const int place = index_of(wiring.local_ranks, wiring.rank);
  const auto num_local = static_cast<int>(wiring.local_ranks.size());
  const bool has_remote = num_local < wiring.world_size;
  const SpinPolicy spin = SpinPolicy::for_ranks(wiring.num_colocated, wiring.num_cores);

  // Owned from the start, so that none is left open if something below throws.
  std::vector<UniqueFd> message_sockets;
  for (const int fd : wiring.message_sockets) message_sockets.emplace_back(fd);
  std::vector<TcpMesh::Socket> sockets;
  for (int peer = 0; peer < wiring.world_size; ++peer)
    if (wiring.collective_sockets[peer] >= 0) sockets.push_back({peer, wiring.collective_sockets[peer]});
  const auto mesh = has_remote ? std::make_shared<TcpMesh>(wiring.rank, wiring.world_size, sockets,
                                                           wiring.num_colocated <= wiring.num_cores)
                               : nullptr;

  Channels channels(wiring.world_size);
  for (int peer = 0; peer < wiring.world_size; ++peer)
    if (message_sockets[peer].get() >= 0)
      channels[peer] = std::make_unique<TcpChannel>(peer, message_sockets[peer].release(), mesh);

  std::shared_ptr<Segment> segment;
  if (num_local > 1) segment = Segment::map_file(wiring.segment_fd, num_local, place);
  if (wiring.world_size == 1) segment = Segment::create(1);
  std::unique_ptr<ShmTransport> local;
  if (segment) {
    const auto peer_memory = std::make_shared<PeerMemory>(segment, place, wiring.peer_reads);
    connect_memory(channels, segment, peer_memory, wiring.local_ranks, place);
    local = std::make_unique<ShmTransport>(segment, place, wiring.local_ranks, spin, true, peer_memory);
  }

  Parts parts;
  if (!has_remote) {
    parts.transport = std::move(local);
  } else if (static_cast<int>(wiring.hosts.size()) == wiring.world_size) {
    parts.transport = std::make_shared<TcpTransport>(mesh, all_ranks(wiring.world_size));
  } else {
    parts.transport = std::make_shared<HostsTransport>(std::move(local), mesh, wiring.hosts);
  }
  parts.messenger = std::make_shared<Messenger>(parts.transport, std::move(channels), segment, place, spin);
  if (segment) parts.heap = std::make_shared<Heap>(segment, place);
  return std::shared_ptr<Communicator>(new Communicator(wiring.rank, wiring.world_size, std::move(parts)));
}

}  // namespace ferro
