// Makes a device current. Which way depends on whose thread it is:
// - a caller's: DeviceGuard, or ContextGuard, for the duration of a scope;
// - one of ours: stay_on_device(), for good;
// - that of whoever drops something, perhaps a collector: run_on_own_device(), see abi/own_device.hpp.
#ifndef FERRO_NCCL_DEVICE_GUARD_HPP
#define FERRO_NCCL_DEVICE_GUARD_HPP

#include "abi/cudart_table.hpp"
#include "nccl/error.hpp"

namespace ferro::nccl {

// If the device cannot be made current, that is left to the call that follows: it fails, and
// has more to say about why.
class DeviceGuard {
 public:
  DeviceGuard(const Cudart& cuda, int device) noexcept : cuda_(cuda) {
    if (cuda_.cudaGetDevice(&before_) == cudaSuccess && before_ != device)
      has_changed_ = cuda_.cudaSetDevice(device) == cudaSuccess;
  }
  ~DeviceGuard() {
    if (has_changed_) cuda_.cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const Cudart& cuda_;
  int before_ = 0;
  bool has_changed_ = false;
};

// The same for calls of NCCL that ask the driver, which needs a context: a thread has none before its first
// call of the runtime that uses the device.
class ContextGuard {
 public:
  ContextGuard(const Cudart& cuda, int device) noexcept : guard_(cuda, device) { cuda.cudaSetDevice(device); }

 private:
  const DeviceGuard guard_;
};

// For threads of our own, which keep the device. A guard would put them back on device 0, where
// a process that uses nothing else there would get a context, of hundreds of megabytes. These
// threads wait and free, as NCCL does in them, which must not end another thread's capture of a graph.
inline void stay_on_device(const Cudart& cuda, int device) noexcept {
  cuda.cudaSetDevice(device);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cuda.cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_DEVICE_GUARD_HPP
