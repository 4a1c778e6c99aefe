#include "nccl/operation.hpp"

#include "nccl/library.hpp"

namespace ferro::nccl {
namespace {

// The sends and receives of one rank, in one group.
class Exchange {
 public:
  Exchange(ncclDataType_t dtype, std::size_t count, ncclComm_t comm, cudaStream_t stream)
      : dtype_(dtype), count_(count), chunk_nbytes_(count * item_size(dtype)), comm_(comm), stream_(stream) {}

  // `index` is that of the chunk within the array.
  void send(const void* array, int index, int peer) {
    group_.note(ncclSend(static_cast<const char*>(array) + index * chunk_nbytes_, count_, dtype_, peer, comm_,
                         stream_));
  }
  void recv(void* array, int index, int peer) {
    group_.note(
        ncclRecv(static_cast<char*>(array) + index * chunk_nbytes_, count_, dtype_, peer, comm_, stream_));
  }
  ncclResult_t end() { return group_.end(); }

 private:
  const ncclDataType_t dtype_;
  const std::size_t count_;
  const std::size_t chunk_nbytes_;
  const ncclComm_t comm_;
  const cudaStream_t stream_;
  CallGroup group_;
};

ncclResult_t all_to_all(const Operation& o, cudaStream_t stream, ncclComm_t comm, int world_size) {
  if (ncclAlltoAll != nullptr) return ncclAlltoAll(o.in, o.out, o.count, o.dtype, comm, stream);
  Exchange exchange(o.dtype, o.count, comm, stream);
  for (int peer = 0; peer < world_size; ++peer) {
    exchange.send(o.in, peer, peer);
    exchange.recv(o.out, peer, peer);
  }
  return exchange.end();
}

ncclResult_t gather(const Operation& o, cudaStream_t stream, ncclComm_t comm, int rank, int world_size) {
  if (ncclGather != nullptr) return ncclGather(o.in, o.out, o.count, o.dtype, o.peer, comm, stream);
  Exchange exchange(o.dtype, o.count, comm, stream);
  exchange.send(o.in, 0, o.peer);
  for (int peer = 0; rank == o.peer && peer < world_size; ++peer) exchange.recv(o.out, peer, peer);
  return exchange.end();
}

ncclResult_t scatter(const Operation& o, cudaStream_t stream, ncclComm_t comm, int rank, int world_size) {
  if (ncclScatter != nullptr) return ncclScatter(o.in, o.out, o.count, o.dtype, o.peer, comm, stream);
  Exchange exchange(o.dtype, o.count, comm, stream);
  for (int peer = 0; rank == o.peer && peer < world_size; ++peer) exchange.send(o.in, peer, peer);
  exchange.recv(o.out, 0, o.peer);
  return exchange.end();
}

ncclResult_t put(const Operation& o, cudaStream_t stream, ncclComm_t comm) {
  return ncclPutSignal(o.in, o.count, o.dtype, o.peer, o.window, o.offset, o.signal, o.context, 0, comm,
                       stream);
}

ncclResult_t wait_signal(const Operation& o, cudaStream_t stream, ncclComm_t comm) {
  ncclWaitSignalDesc_t awaited = {o.signal_count, o.peer, o.signal, o.context};
  return ncclWaitSignal(1, &awaited, comm, stream);
}

}  // namespace

const char* function_of(Op op) noexcept {
  static constexpr const char* names[] = {
      "ncclAllReduce", "ncclBroadcast", "ncclReduce",     "ncclAllGather", "ncclReduceScatter",
      "ncclAlltoAll",  "ncclGather",    "ncclScatter",    "ncclSend",      "ncclRecv",
      "ncclPutSignal", "ncclSignal",    "ncclWaitSignal",
  };
  return names[static_cast<int>(op)];
}

std::size_t item_size(ncclDataType_t dtype) noexcept {
  static constexpr unsigned char sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[dtype];
}

void check_available(Op op) {
  if (op == Op::put) require(ncclPutSignal, "ncclPutSignal", "2.29.2");
  if (op == Op::signal) require(ncclSignal, "ncclSignal", "2.29.2");
  if (op == Op::wait_signal) require(ncclWaitSignal, "ncclWaitSignal", "2.29.2");
}

ncclResult_t issue(const Operation& o, cudaStream_t stream, ncclComm_t comm, int rank, int world_size) {
  switch (o.op) {
    case Op::allreduce:
      return ncclAllReduce(o.in, o.out, o.count, o.dtype, o.reduce_op, comm, stream);
    case Op::broadcast:
      return ncclBroadcast(o.in, o.out, o.count, o.dtype, o.peer, comm, stream);
    case Op::reduce:
      return ncclReduce(o.in, o.out, o.count, o.dtype, o.reduce_op, o.peer, comm, stream);
    case Op::all_gather:
      return ncclAllGather(o.in, o.out, o.count, o.dtype, comm, stream);
    case Op::reduce_scatter:
      return ncclReduceScatter(o.in, o.out, o.count, o.dtype, o.reduce_op, comm, stream);
    case Op::all_to_all:
      return all_to_all(o, stream, comm, world_size);
    case Op::gather:
      return gather(o, stream, comm, rank, world_size);
    case Op::scatter:
      return scatter(o, stream, comm, rank, world_size);
    case Op::send:
      return ncclSend(o.in, o.count, o.dtype, o.peer, comm, stream);
    case Op::recv:
      return ncclRecv(o.out, o.count, o.dtype, o.peer, comm, stream);
    case Op::put:
      return put(o, stream, comm);
    case Op::signal:
      return ncclSignal(o.peer, o.signal, o.context, 0, comm, stream);
    case Op::wait_signal:
      return wait_signal(o, stream, comm);
  }
  return ncclInvalidArgument;
}

}  // namespace ferro::nccl
