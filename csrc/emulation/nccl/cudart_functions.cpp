#include "emulation/nccl/cudart_functions.hpp"

#include <dlfcn.h>

#include "emulation/nccl/failure.hpp"

namespace emulation {
namespace {

// Whether the program linked the library or loaded it for itself alone.
void* loaded_library() {
  for (const char* soname : {"libcudart.so.12", "libcudart.so.13"}) {
    void* library = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) continue;
    if (dlsym(library, "ferroEmulationIsEmulated") != nullptr) return library;
    dlclose(library);
  }
  fail(ncclUnhandledCudaError,
       "the emulated libnccl works with the emulated libcudart only, and that is not loaded: start with "
       "ferrorun --emulate-gpu, or call ferro_dist.testing.emulated_gpu() first");
}

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  require(function != nullptr, ncclInternalError, "the emulated libcudart has no ", name);
}

CudartFunctions load() {
  void* library = loaded_library();
  CudartFunctions found{};
  find(library, "cudaGetDevice", found.get_device);
  find(library, "cudaSetDevice", found.set_device);
  find(library, "cudaGetDeviceCount", found.get_device_count);
  find(library, "cudaDeviceGetAttribute", found.device_get_attribute);
  find(library, "cudaMalloc", found.malloc);
  find(library, "cudaFree", found.free);
  find(library, "cudaLaunchHostFunc", found.launch_host_func);
  find(library, "cudaStreamGetDevice", found.stream_get_device);
  find(library, "cudaStreamWaitEvent", found.stream_wait_event);
  find(library, "cudaEventCreateWithFlags", found.event_create_with_flags);
  find(library, "cudaEventRecord", found.event_record);
  find(library, "cudaEventSynchronize", found.event_synchronize);
  find(library, "cudaEventDestroy", found.event_destroy);
  find(library, "cudaUserObjectCreate", found.user_object_create);
  find(library, "cudaGraphRetainUserObject", found.graph_retain_user_object);
  find(library, "cudaGetErrorString", found.get_error_string);
  find(library, "ferroEmulationDeviceRange", found.device_range);
  find(library, "ferroEmulationSetActivity", found.set_activity);
  find(library, "ferroEmulationGetAsker", found.get_asker);
  find(library, "ferroEmulationAskFor", found.ask_for);
  find(library, "ferroEmulationGraphOf", found.graph_of);
  find(library, "ferroEmulationThreadHasContext", found.thread_has_context);
  return found;
}

}  // namespace

const CudartFunctions& cudart() {
  static const CudartFunctions functions = load();
  return functions;
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  fail(ncclUnhandledCudaError, "CUDA failure ", static_cast<int>(error), ": ",
       cudart().get_error_string(error));
}

void require_context(const char* function) {
  require(cudart().thread_has_context() != 0, ncclUnhandledCudaError, function,
          ": CUDA failure 201: invalid device context");
}

DeviceGuard::DeviceGuard(int device) {
  check(cudart().get_device(&before_));
  check(cudart().set_device(device));
}

DeviceGuard::~DeviceGuard() { cudart().set_device(before_); }

}  // namespace emulation
