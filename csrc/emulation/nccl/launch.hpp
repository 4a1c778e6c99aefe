// What one group gives to one communicator: one operation of a stream, as a fused
// kernel of NCCL's is.
#ifndef EMULATION_NCCL_LAUNCH_HPP
#define EMULATION_NCCL_LAUNCH_HPP

#include <vector>

#include "emulation/nccl/operation.hpp"

namespace emulation {

// Puts the operations into their streams: into the first one's stream, after what is in
// the others, and these go on after it.
void launch(const CommunicatorPtr& communicator, std::vector<Operation> operations);

}  // namespace emulation

#endif  // EMULATION_NCCL_LAUNCH_HPP
