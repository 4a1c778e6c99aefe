// What one group gives to one communicator: a single operation of a stream, like a fused
// kernel of NCCL's.
#ifndef EMULATION_NCCL_LAUNCH_HPP
#define EMULATION_NCCL_LAUNCH_HPP

#include <vector>

#include "emulation/nccl/operation.hpp"

namespace emulation {

// Puts all operations into the stream of the first one, after what is in the streams of the
// others; those go on after them.
void launch(const CommunicatorPtr& communicator, std::vector<Operation> operations);

}  // namespace emulation

#endif  // EMULATION_NCCL_LAUNCH_HPP
