// What a program asks of a communicator to do in a stream.
#ifndef EMULATION_NCCL_OPERATION_HPP
#define EMULATION_NCCL_OPERATION_HPP

#include <vector>

#include "emulation/nccl/communicator.hpp"

namespace emulation {

enum class Kind {
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

struct Operation {
  Kind kind = Kind::allreduce;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;
  ncclDataType_t dtype = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  int peer = 0;  // or root
  cudaStream_t stream = nullptr;
  // put, signal and wait_signal
  ncclWindow_t window = nullptr;
  std::size_t offset = 0;
  int signal_index = 0;
  int signal_context = 0;
  std::vector<ncclWaitSignalDesc_t> awaited = {};

  // Filled in by check_operation.
  bool has_multiplier = false;
  Multiplier multiplier = {};
  std::shared_ptr<Window> target = nullptr;
  bool is_registered = false;  // all memory that this rank passes
  std::vector<UseToken> used = {};
  Fault fault = {};

  bool is_collective() const { return kind < Kind::send; }
  bool is_transfer() const { return kind == Kind::send || kind == Kind::recv; }
};

const char* function_of(Kind kind);  // "ncclAllReduce"
bool has_peer(Kind kind);            // or a root
bool is_reduction(Kind kind);

// Throws Failure for what is wrong with the arguments on this rank, or for the fault that
// is due here.
void check_operation(Communicator& communicator, Operation& operation);

// In the stream's thread. Throw Failure, or Interrupted.
void run_collective(Communicator& communicator, const Operation& operation);
// Sends and receives of one group make progress together.
void run_transfers(Communicator& communicator, const std::vector<const Operation*>& transfers);
void run_put(Communicator& communicator, const Operation& operation);
void run_signal(Communicator& communicator, const Operation& operation);
void run_wait_signal(Communicator& communicator, const Operation& operation);

}  // namespace emulation

#endif  // EMULATION_NCCL_OPERATION_HPP
