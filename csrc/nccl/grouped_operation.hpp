// Several operations, perhaps of several communicators, launched as one of NCCL's groups.
#ifndef FERRO_NCCL_GROUPED_OPERATION_HPP
#define FERRO_NCCL_GROUPED_OPERATION_HPP

#include <vector>

#include "nccl/communicator.hpp"
#include "nccl/operation.hpp"
#include "nccl/patience.hpp"

namespace ferro::nccl {

struct GroupedOperation {
  Communicator* communicator;
  Operation operation;
};

// Whether no operation writes where another of them reads or writes: NCCL runs them at once. Allreduces
// only, each in place or between arrays that share nothing.
bool are_apart(const std::vector<GroupedOperation>& allreduces);

void launch_group(const std::vector<GroupedOperation>& operations, Patience& patience);

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_GROUPED_OPERATION_HPP
