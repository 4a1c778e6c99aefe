// Where to give back what belongs to a device.
#ifndef FERRO_ABI_OWN_DEVICE_HPP
#define FERRO_ABI_OWN_DEVICE_HPP

#include <exception>
#include <thread>

#include "abi/stream_capture.hpp"

namespace ferro {

// Runs `body`, which throws nothing, for whatever thread drops the last reference to something, or runs the
// collector: it may be on another device. A call there would make a context on that one, of hundreds of
// megabytes, and so would the way back there from the right device. So a thread of its own makes it, and is
// waited for.
template <typename Body>
void run_on_own_device(const Cudart& cuda, int device, Body body) noexcept {
  int current = -1;
  if (cuda.cudaGetDevice(&current) == cudaSuccess && current == device) return body();
  try {
    std::thread([&] {
      cuda.cudaSetDevice(device);
      body();
    }).join();
  } catch (const std::exception&) {  // no more threads can be made: better a context than a leak
    cuda.cudaSetDevice(device);
    body();
    if (current >= 0) cuda.cudaSetDevice(current);
  }
}

// The same for one call that destroys or frees.
template <typename... Parameters, typename... Arguments>
cudaError_t on_own_device(const Cudart& cuda, int device, cudaError_t (*function)(Parameters...),
                          Arguments... arguments) noexcept {
  cudaError_t status = cudaSuccess;
  run_on_own_device(cuda, device, [&] { status = relaxed(cuda, function, arguments...); });
  return status;
}

}  // namespace ferro

#endif  // FERRO_ABI_OWN_DEVICE_HPP
