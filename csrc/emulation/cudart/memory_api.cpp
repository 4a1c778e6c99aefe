// Allocation, copies, and what memory an address belongs to.
#include <cstring>
#include <memory>
#include <optional>

#include "emulation/cudart/runtime.hpp"
#include "emulation/environment.hpp"

using namespace emulation;

namespace {

void allocate(void** out, MemoryKind kind, std::size_t nbytes) {
  require(out != nullptr);
  require(runtime().num_devices > 0, cudaErrorNoDevice);
  *out = nullptr;
  const Fault fault = kind == MemoryKind::pinned ? Fault{} : runtime().faults.next("malloc");
  require(fault.act != Act::out_of_memory, cudaErrorMemoryAllocation);
  if (nbytes == 0) return;
  *out = runtime().memory.allocate(kind, current_device(), nbytes);
  require(*out != nullptr, cudaErrorMemoryAllocation);
}

void refuse_locked() {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  refuse_during_capture();
}

// At once, whether work is in flight or not. A real cudaFree waits for the device, whereas caching
// allocators hand the memory to somebody else without waiting: the emulation forgives neither.
void release(void* data, bool is_device) {
  if (data == nullptr) return;
  require(runtime().memory.retire(data, is_device));
  runtime().memory.make_inaccessible(data);
}

// Nothing for pageable memory. Refuses what does not lie in one live allocation, if it lies in any.
std::optional<MemoryKind> kind_of(const void* data, std::size_t nbytes) {
  Allocation found;
  if (!runtime().memory.find(data, &found)) return std::nullopt;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  require(!found.is_freed && address >= found.base && address + nbytes <= found.end());
  return found.kind;
}

void require_side(std::optional<MemoryKind> kind, bool is_device) {
  require((kind == MemoryKind::device) == is_device);
}

struct Ends {
  bool is_dst_pageable;
  bool is_src_pageable;
};

Ends check_copy(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind) {
  require(kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault, cudaErrorInvalidMemcpyDirection);
  const std::optional<MemoryKind> dst_kind = kind_of(dst, nbytes);
  const std::optional<MemoryKind> src_kind = kind_of(src, nbytes);
  if (kind != cudaMemcpyDefault) {
    require_side(dst_kind, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
    require_side(src_kind, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
  }
  return {!dst_kind, !src_kind};
}

// Whether GPUs reach all memory of the host, as on a Grace Hopper.
bool is_host_reached() {
  static const bool is_reached = setting("PAGEABLE_ACCESS", 0, 0, 1) != 0;
  return is_reached;
}

// Pageable memory is given back to the caller as CUDA does: a source when the call returns, a
// destination when the copy is done. Where GPUs reach it, as pinned memory: when the stream
// has passed.
void copy(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind, cudaStream_t handle,
          bool is_async) {
  if (nbytes == 0) return;
  const Ends ends = check_copy(dst, src, nbytes, kind);
  MilestonePtr done;
  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    if (!is_async) refuse_during_capture();
    const StreamPtr stream = find_stream(handle);
    std::shared_ptr<char[]> staged;
    if (ends.is_src_pageable && !stream->capture && !is_host_reached()) {
      staged.reset(new char[nbytes]);
      std::memcpy(staged.get(), src, nbytes);
    }
    done = enqueue(stream, {"cudaMemcpyAsync", [dst, src, nbytes, staged] {
                              std::memmove(dst, staged ? staged.get() : src, nbytes);
                            }});
  }
  const bool is_waited_for = ends.is_dst_pageable && !is_host_reached();
  if (done && (!is_async || is_waited_for)) done->wait();
}

void fill(void* dst, int value, std::size_t nbytes, cudaStream_t handle, bool is_async) {
  if (nbytes == 0) return;
  require(kind_of(dst, nbytes).has_value());
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  if (!is_async) refuse_during_capture();
  enqueue(find_stream(handle), {"cudaMemsetAsync", [=] { std::memset(dst, value, nbytes); }});
}

}  // namespace

EMULATION_API cudaError_t cudaMalloc(void** data, std::size_t nbytes) {
  return guarded([&] {
    refuse_locked();
    make_context();
    allocate(data, MemoryKind::device, nbytes);
  });
}

EMULATION_API cudaError_t cudaMallocAsync(void** data, std::size_t nbytes, cudaStream_t handle) {
  return guarded([&] {
    {
      const std::lock_guard<std::mutex> lock(runtime().mutex);
      require(find_stream(handle)->capture == nullptr, cudaErrorStreamCaptureUnsupported);
    }
    allocate(data, MemoryKind::device, nbytes);
  });
}

EMULATION_API cudaError_t cudaFree(void* data) {
  return guarded([&] {
    refuse_locked();
    make_context();
    release(data, true);
  });
}

EMULATION_API cudaError_t cudaFreeAsync(void* data, cudaStream_t handle) {
  return guarded([&] {
    if (data == nullptr) return;
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const StreamPtr stream = find_stream(handle);
    require(stream->capture == nullptr, cudaErrorStreamCaptureUnsupported);
    require(runtime().memory.retire(data, true));
    // Never delayed, and at once if possible: a program that counts on the delay of another
    // stream is to find the memory gone.
    const auto free_now = [data] { runtime().memory.make_inaccessible(data); };
    is_idle(stream) ? free_now() : void(enqueue(stream, {"cudaFreeAsync", free_now, {}, false}));
  });
}

EMULATION_API cudaError_t cudaMallocHost(void** data, std::size_t nbytes) {
  return guarded([&] {
    refuse_locked();
    make_context();
    allocate(data, MemoryKind::pinned, nbytes);
  });
}

EMULATION_API cudaError_t cudaHostAlloc(void** data, std::size_t nbytes, unsigned) {
  return cudaMallocHost(data, nbytes);
}

EMULATION_API cudaError_t cudaFreeHost(void* data) {
  return guarded([&] {
    refuse_locked();
    make_context();
    release(data, false);
  });
}

EMULATION_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  return guarded([&] {
    require(attributes != nullptr);
    make_context();
    // Field by field: programs built for CUDA 12 have no room for `reserved`.
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;  // cudaInvalidDeviceId
    attributes->devicePointer = nullptr;
    attributes->hostPointer = const_cast<void*>(data);
    Allocation found;
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    if (!runtime().memory.find(data, &found) || found.is_freed || address < found.base) return;
    attributes->device = found.device;
    attributes->devicePointer = const_cast<void*>(data);
    if (found.kind == MemoryKind::device) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->hostPointer = nullptr;
    } else {
      attributes->type = cudaMemoryTypeHost;
    }
  });
}

EMULATION_API cudaError_t cudaMemcpy(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind) {
  return guarded([&] { copy(dst, src, nbytes, kind, nullptr, false); });
}

EMULATION_API cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind,
                                          cudaStream_t stream) {
  return guarded([&] { copy(dst, src, nbytes, kind, stream, true); });
}

EMULATION_API cudaError_t cudaMemset(void* dst, int value, std::size_t nbytes) {
  return guarded([&] { fill(dst, value, nbytes, nullptr, false); });
}

EMULATION_API cudaError_t cudaMemsetAsync(void* dst, int value, std::size_t nbytes, cudaStream_t stream) {
  return guarded([&] { fill(dst, value, nbytes, stream, true); });
}

// For the emulated NCCL, which checks what it is given: where the allocation that `data` lies
// in begins and ends. -1 if there is none, 0 if it was freed or is host memory.
EMULATION_API int ferroEmulationDeviceRange(const void* data, std::uintptr_t* begin, std::uintptr_t* end,
                                            int* device) {
  Allocation found;
  if (!runtime().memory.find(data, &found)) return -1;
  *begin = found.base;
  *end = found.end();
  *device = found.device;
  return !found.is_freed && found.kind == MemoryKind::device ? 1 : 0;
}
