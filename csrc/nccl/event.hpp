// Whether a stream has reached a point that was marked in it, and whether it can be marked.
#ifndef FERRO_NCCL_EVENT_HPP
#define FERRO_NCCL_EVENT_HPP

#include "abi/stream_capture.hpp"
#include "nccl/error.hpp"

namespace ferro::nccl {

inline void check(cudaError_t status, const char* function) {
  if (status != cudaSuccess) throw Error(ErrorKind::cuda, function, status);
}

// See abi/stream_capture.hpp.
inline Capture capture_of(const Cudart& cuda, cudaStream_t stream) {
  Capture capture = Capture::none;
  check(ferro::capture_of(cuda, stream, &capture), "cudaStreamIsCapturing");
  return capture;
}

inline bool has_passed(const Cudart& cuda, cudaEvent_t event) {
  const cudaError_t status = relaxed(cuda, cuda.cudaEventQuery, event);
  if (status == cudaErrorNotReady) {
    cuda.cudaGetLastError();  // else whoever asks next would get this error
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_EVENT_HPP
