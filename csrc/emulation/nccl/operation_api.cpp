// Collectives, messages, one-sided operations and groups.
#include <utility>

#include "emulation/nccl/calls.hpp"
#include "emulation/nccl/cudart_functions.hpp"
#include "emulation/nccl/group.hpp"

using namespace emulation;

namespace {

// What a single rank multiplies is launched here and now. On other ranks a thread of NCCL's own does that,
// which sets the device.
void check_device(const Communicator& communicator, const Operation& operation) {
  if (communicator.num_ranks > 1 || !(operation.has_multiplier || operation.reduction == ncclAvg)) return;
  int device = 0;
  check(cudart().get_device(&device));
  require(device == communicator.device, ncclUnhandledCudaError, function_of(operation.kind),
          ": a kernel cannot be launched on a stream of device ", communicator.device,
          " while the current device is ", device);
}

// As with the real library, a refused argument stays the error of a communicator that does not block. That
// it was revoked does not.
ncclResult_t call(ncclComm_t comm, Operation operation) {
  return guarded([&] {
    const Use use(comm, function_of(operation.kind));
    try {
      check_operation(*use, operation);
      check_device(*use, operation);
    } catch (const Failure& failure) {
      const bool is_kept = !use->is_blocking() && failure.code != ncclInvalidUsage;
      if (is_kept) use->fail_later(failure.code, failure.text);
      throw;
    }
    return submit(use.get(), std::move(operation));
  });
}

Operation collective(Kind kind, const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                     ncclRedOp_t reduction, int root, cudaStream_t stream) {
  Operation operation;
  operation.kind = kind;
  operation.in = in;
  operation.out = out;
  operation.count = count;
  operation.dtype = dtype;
  operation.reduction = reduction;
  operation.peer = root;
  operation.stream = stream;
  return operation;
}

}  // namespace

EMULATION_API ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                                         ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::allreduce, in, out, count, dtype, op, 0, stream));
}

EMULATION_API ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                                         int root, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::broadcast, in, out, count, dtype, ncclSum, root, stream));
}

EMULATION_API ncclResult_t ncclBcast(void* data, std::size_t count, ncclDataType_t dtype, int root,
                                     ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, dtype, root, comm, stream);
}

EMULATION_API ncclResult_t ncclReduce(const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                                      ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::reduce, in, out, count, dtype, op, root, stream));
}

EMULATION_API ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                                         ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::all_gather, in, out, count, dtype, ncclSum, 0, stream));
}

EMULATION_API ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count,
                                             ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                             cudaStream_t stream) {
  return call(comm, collective(Kind::reduce_scatter, in, out, count, dtype, op, 0, stream));
}

EMULATION_API ncclResult_t ncclAlltoAll(const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                                        ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::all_to_all, in, out, count, dtype, ncclSum, 0, stream));
}

EMULATION_API ncclResult_t ncclGather(const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                                      int root, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::gather, in, out, count, dtype, ncclSum, root, stream));
}

EMULATION_API ncclResult_t ncclScatter(const void* in, void* out, std::size_t count, ncclDataType_t dtype,
                                       int root, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::scatter, in, out, count, dtype, ncclSum, root, stream));
}

EMULATION_API ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t dtype, int peer,
                                    ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::send, data, nullptr, count, dtype, ncclSum, peer, stream));
}

EMULATION_API ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t dtype, int peer,
                                    ncclComm_t comm, cudaStream_t stream) {
  return call(comm, collective(Kind::recv, nullptr, data, count, dtype, ncclSum, peer, stream));
}

EMULATION_API ncclResult_t ncclPutSignal(const void* data, std::size_t count, ncclDataType_t dtype, int peer,
                                         ncclWindow_t window, std::size_t offset, int index, int context,
                                         unsigned, ncclComm_t comm, cudaStream_t stream) {
  Operation operation = collective(Kind::put, data, nullptr, count, dtype, ncclSum, peer, stream);
  operation.window = window;
  operation.offset = offset;
  operation.signal_index = index;
  operation.signal_context = context;
  return call(comm, std::move(operation));
}

EMULATION_API ncclResult_t ncclSignal(int peer, int index, int context, unsigned, ncclComm_t comm,
                                      cudaStream_t stream) {
  Operation operation = collective(Kind::signal, nullptr, nullptr, 0, ncclInt8, ncclSum, peer, stream);
  operation.signal_index = index;
  operation.signal_context = context;
  return call(comm, std::move(operation));
}

EMULATION_API ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t* awaited, ncclComm_t comm,
                                          cudaStream_t stream) {
  if (count < 0 || (count > 0 && awaited == nullptr)) {
    return remember({ncclInvalidArgument, "ncclWaitSignal: no descriptors"});
  }
  Operation operation = collective(Kind::wait_signal, nullptr, nullptr, 0, ncclInt8, ncclSum, 0, stream);
  operation.awaited.assign(awaited, awaited + count);
  return call(comm, std::move(operation));
}

EMULATION_API ncclResult_t ncclGroupStart() {
  start_group();
  return ncclSuccess;
}

EMULATION_API ncclResult_t ncclGroupEnd() {
  return guarded([] { return end_group(); });
}
