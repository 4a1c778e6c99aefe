// Devices, versions, words of errors, and what controls the emulation.
#include <dlfcn.h>

#include <string>

#include "emulation/cudart/runtime.hpp"
#include "emulation/environment.hpp"

using namespace emulation;

namespace {

// 12.9 and 13.0 are built from the same sources and differ only in their names.
int version() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&cudaRuntimeGetVersion), &info);
  const std::string path = info.dli_fname == nullptr ? "" : info.dli_fname;
  return path.find(".so.13") != std::string::npos ? 13000 : 12090;
}

struct ErrorText {
  cudaError_t code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText* find_error(cudaError_t code) {
  for (const ErrorText& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

void require_device(int device) {
  require(device >= 0 && device < runtime().num_devices, cudaErrorInvalidDevice);
}

void synchronize_device(int device) {
  std::vector<MilestonePtr> milestones;
  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    refuse_during_capture();
    for (const StreamPtr& stream : live_streams(device)) milestones.push_back(stream->latest());
  }
  for (const MilestonePtr& milestone : milestones) {
    if (milestone) milestone->wait();
  }
}

int compute_capability() { return static_cast<int>(setting("COMPUTE_CAPABILITY", 90, 50, 999)); }

int attribute_of(cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return compute_capability() / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return compute_capability() % 10;
  }
  return 0;  // of whatever else a real device may have
}

}  // namespace

EMULATION_API const char* cudaGetErrorName(cudaError_t code) {
  const ErrorText* error = find_error(code);
  return error == nullptr ? "unrecognized error code" : error->name;
}

EMULATION_API const char* cudaGetErrorString(cudaError_t code) {
  const ErrorText* error = find_error(code);
  return error == nullptr ? "unrecognized error code" : error->text;
}

EMULATION_API cudaError_t cudaRuntimeGetVersion(int* out) {
  if (out == nullptr) return remember(cudaErrorInvalidValue);
  *out = version();
  return cudaSuccess;
}

EMULATION_API cudaError_t cudaDriverGetVersion(int* out) { return cudaRuntimeGetVersion(out); }

EMULATION_API cudaError_t cudaGetDeviceCount(int* count) {
  return guarded([&] {
    require(count != nullptr);
    *count = runtime().num_devices;
    require(*count > 0, cudaErrorNoDevice);
  });
}

EMULATION_API cudaError_t cudaSetDevice(int device) {
  return guarded([&] {
    require_device(device);
    current_device() = device;
    make_context();  // since CUDA 12
  });
}

EMULATION_API cudaError_t cudaGetDevice(int* device) {
  return guarded([&] {
    require(device != nullptr);
    require(runtime().num_devices > 0, cudaErrorNoDevice);
    *device = current_device();
  });
}

EMULATION_API cudaError_t cudaDeviceSynchronize() {
  return guarded([&] { synchronize_device(current_device()); });
}

EMULATION_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return guarded([&] {
    require(value != nullptr);
    require_device(device);
    *value = attribute_of(attribute);
  });
}

EMULATION_API cudaError_t cudaMemGetInfo(std::size_t* free_nbytes, std::size_t* total_nbytes) {
  return guarded([&] {
    require(free_nbytes != nullptr && total_nbytes != nullptr);
    *free_nbytes = runtime().memory.free_nbytes(current_device());
    *total_nbytes = runtime().memory.capacity_nbytes();
  });
}

// 1 in the emulation; no real libcudart has this function.
EMULATION_API int ferroEmulationIsEmulated() { return 1; }

// By how many microseconds every operation of every stream is late from now on.
EMULATION_API void ferroEmulationSetDelay(int microseconds) { set_delay_us(microseconds); }

// For the emulated NCCL, whose threads act for those that called it: see Asker.
EMULATION_API void ferroEmulationGetAsker(int words[2]) {
  const Asker asker = Asker::here();
  words[0] = asker.thread;
  words[1] = asker.clock;
}
EMULATION_API void ferroEmulationAskFor(const int words[2]) { ask_for({words[0], words[1], 0}); }

// For the emulated NCCL: the name of the calling host function, for the report of a fault in it.
EMULATION_API void ferroEmulationSetActivity(const char* operation) { set_activity(operation); }

// Faults at point=malloc, as FERRO_EMULATION_FAULT gives them. 0 if understood.
EMULATION_API int ferroEmulationSetMemoryFaults(const char* plan) {
  return runtime().faults.set(plan == nullptr ? "" : plan) ? 0 : -1;
}

// Whether some call has made a context on the device.
EMULATION_API int ferroEmulationHasContext(int device) {
  return runtime().contexts.at(static_cast<std::size_t>(device)) ? 1 : 0;
}

// For the emulated NCCL: whether the calling thread has made a context, which the driver's functions need.
EMULATION_API int ferroEmulationThreadHasContext() { return thread_has_context() ? 1 : 0; }

// Streams that exist, or still have work: for tests that look for leaks.
EMULATION_API int ferroEmulationCountStreams() {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  int count = 0;
  for (int device = 0; device < runtime().num_devices; ++device) {
    count += static_cast<int>(live_streams(device).size());
  }
  return count;
}
