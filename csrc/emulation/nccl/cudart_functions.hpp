// The functions of libcudart that the emulated NCCL uses, found in the library that the
// process has loaded already: .12 or .13, it makes no difference.
#ifndef EMULATION_NCCL_CUDART_FUNCTIONS_HPP
#define EMULATION_NCCL_CUDART_FUNCTIONS_HPP

#include <cstddef>
#include <cstdint>

#include "abi/nccl.h"
#include "emulation/cudart/cuda_abi.hpp"

namespace emulation {

struct CudartFunctions {
  cudaError_t (*get_device)(int*);
  cudaError_t (*set_device)(int);
  cudaError_t (*get_device_count)(int*);
  cudaError_t (*device_get_attribute)(int*, cudaDeviceAttr, int);
  cudaError_t (*malloc)(void**, std::size_t);
  cudaError_t (*free)(void*);
  cudaError_t (*launch_host_func)(cudaStream_t, cudaHostFn_t, void*);
  cudaError_t (*stream_get_device)(cudaStream_t, int*);
  cudaError_t (*stream_wait_event)(cudaStream_t, cudaEvent_t, unsigned);
  cudaError_t (*event_create_with_flags)(cudaEvent_t*, unsigned);
  cudaError_t (*event_record)(cudaEvent_t, cudaStream_t);
  cudaError_t (*event_synchronize)(cudaEvent_t);
  cudaError_t (*event_destroy)(cudaEvent_t);
  cudaError_t (*user_object_create)(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned);
  cudaError_t (*graph_retain_user_object)(cudaGraph_t, cudaUserObject_t, unsigned, unsigned);
  const char* (*get_error_string)(cudaError_t);
  int (*device_range)(const void*, std::uintptr_t*, std::uintptr_t*, int*);
  void (*set_activity)(const char*);
  void (*get_asker)(int*);
  void (*ask_for)(const int*);
  cudaError_t (*graph_of)(cudaStream_t, cudaGraph_t*);
  int (*thread_has_context)();
};

// Throws Failure unless the emulated libcudart is loaded.
const CudartFunctions& cudart();

// Throws Failure, ncclUnhandledCudaError, unless it is a success.
void check(cudaError_t error);
// As the driver's functions do where the calling thread has no context.
void require_context(const char* function);

// Makes a device current, and at the end the one that was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

}  // namespace emulation

#endif  // EMULATION_NCCL_CUDART_FUNCTIONS_HPP
