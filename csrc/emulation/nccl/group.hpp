// ncclGroupStart .. ncclGroupEnd: of the calling thread, nested. A call outside of any
// is a group of its own.
#ifndef EMULATION_NCCL_GROUP_HPP
#define EMULATION_NCCL_GROUP_HPP

#include <functional>

#include "emulation/nccl/operation.hpp"

namespace emulation {

void start_group();
// Carries out what was called since the outermost start; if any call failed, nothing.
ncclResult_t end_group();
// A call failed: if the thread is in a group, its end will say so and do nothing.
void poison_group(ncclResult_t code);
// A level that is never ended: what ncclCommDestroy of a failed communicator leaves behind.
void leak_group_level();

// Both carried out at the end of the group. A job is one that talks to other ranks.
ncclResult_t submit(const CommunicatorPtr& communicator, Operation operation);
ncclResult_t submit(const CommunicatorPtr& communicator, std::function<void()> job);

}  // namespace emulation

#endif  // EMULATION_NCCL_GROUP_HPP
