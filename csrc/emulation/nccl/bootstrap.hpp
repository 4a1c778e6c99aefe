// How ranks that know a unique id find each other, and come to share memory.
//
// Rank 0 listens on the abstract Unix socket that the id names; the others dial until
// it is there, and say who they are. When all have come, each gets the descriptor of
// the segment, and nothing listens any more. Abstract sockets and memfds leave no file
// behind, no matter who is killed when. All ranks are on one host.
#ifndef EMULATION_NCCL_BOOTSTRAP_HPP
#define EMULATION_NCCL_BOOTSTRAP_HPP

#include <atomic>
#include <cstdint>

#include "abi/nccl.h"

namespace emulation {

struct Newcomer {
  std::uint64_t magic = 0;
  std::int32_t rank = 0;
  std::int32_t num_ranks = 0;
  std::int32_t device = 0;
  std::int32_t num_devices = 0;
  std::uint64_t host = 0;  // a hash of NCCL_HOSTID
};

ncclUniqueId make_unique_id();
// The id under which the ranks of a successor of `parent` meet: the same for equal words.
ncclUniqueId derive_unique_id(const ncclUniqueId& parent, const std::uint64_t* words, int count);
bool is_unique_id(const ncclUniqueId& id);

// Returns the descriptor of the segment once all ranks are there. Throws Failure;
// Interrupted when `stop` is set.
int meet(const ncclUniqueId& id, Newcomer self, const std::atomic<bool>& stop);

}  // namespace emulation

#endif  // EMULATION_NCCL_BOOTSTRAP_HPP
