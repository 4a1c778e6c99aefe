// One call of NCCL that moves data, as a value: to be launched at once, or kept until
// the group that it belongs to is complete.
#ifndef FERRO_NCCL_OPERATION_HPP
#define FERRO_NCCL_OPERATION_HPP

#include <cstddef>

#include "abi/nccl.h"

namespace ferro::nccl {

class Communicator;

enum class Op : unsigned char {
  allreduce,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send,
  recv,
  put,
  signal,
  wait_signal,
};

// NCCL's name of the call.
const char* function_of(Op op) noexcept;

struct Operation {
  Op op = Op::allreduce;
  ncclDataType_t dtype = ncclUint8;
  ncclRedOp_t reduce_op = ncclSum;
  int peer = 0;           // the root, for collectives that have one
  std::size_t count = 0;  // elements as NCCL counts them: per rank, where ranks have parts
  const void* in = nullptr;
  void* out = nullptr;
  cudaStream_t stream = nullptr;
  // One-sided operations.
  ncclWindow_t window = nullptr;
  std::size_t offset = 0;  // bytes into the window of `peer`
  int signal = 0;
  int context = 0;
  int signal_count = 0;  // wait_signal: how many signals of `peer`
};

std::size_t item_size(ncclDataType_t dtype) noexcept;

// Throws ErrorKind::too_old if the loaded library has no such call, and no others can stand in for it.
void check_available(Op op);

// Makes the call on `comm`, and on `stream` whatever the operation's own is. Where the loaded library is
// older than all_to_all, gather and scatter (2.28), a group of sends and receives stands in for them.
ncclResult_t issue(const Operation& operation, cudaStream_t stream, ncclComm_t comm, int rank,
                   int world_size);

// One of NCCL's groups, perhaps inside another one. Whoever begins it ends it, even if a call in it has
// failed: else NCCL would queue all later calls of this thread in it.
class CallGroup {
 public:
  CallGroup() : result_(ncclGroupStart()) {}

  bool is_well() const { return result_ == ncclSuccess; }
  // What a call in it returned. The first error is the group's; of progress its end tells.
  void note(ncclResult_t result) {
    if (is_well() && result != ncclInProgress) result_ = result;
  }
  ncclResult_t end() {
    const ncclResult_t result = ncclGroupEnd();
    return is_well() ? result : result_;
  }

 private:
  ncclResult_t result_;
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_OPERATION_HPP
