// Where to give back what belongs to a device.
#ifndef FERRO_ABI_OWN_DEVICE_HPP
#define FERRO_ABI_OWN_DEVICE_HPP

#include <exception>
#include <thread>

#include "abi/stream_capture.hpp"

namespace ferro {

// A call that destroys or frees, for whatever thread drops the last reference, or runs the collector: it
// may be on another device. The call would make a context there, of hundreds of megabytes, and so would
// the way back there from the right device. So a thread of its own makes it, and is waited for.
template <typename... Parameters, typename... Arguments>
cudaError_t on_own_device(const Cudart& cuda, int device, cudaError_t (*function)(Parameters...),
                          Arguments... arguments) noexcept {
  int current = -1;
  if (cuda.cudaGetDevice(&current) == cudaSuccess && current == device)
    return relaxed(cuda, function, arguments...);
  cudaError_t status = cudaSuccess;
  try {
    std::thread([&] {
      cuda.cudaSetDevice(device);
      status = relaxed(cuda, function, arguments...);
    }).join();
  } catch (const std::exception&) {  // no more threads can be made: better a context than a leak
    return relaxed(cuda, function, arguments...);
  }
  return status;
}

}  // namespace ferro

#endif  // FERRO_ABI_OWN_DEVICE_HPP
