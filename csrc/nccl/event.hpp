// Whether a stream has reached a point that was marked in it.
#ifndef FERRO_NCCL_EVENT_HPP
#define FERRO_NCCL_EVENT_HPP

#include "abi/cudart_table.hpp"
#include "nccl/error.hpp"

namespace ferro::nccl {

inline void check(cudaError_t status, const char* function) {
  if (status != cudaSuccess) throw Error(ErrorKind::cuda, function, status);
}

// Lets this thread do what CUDA otherwise refuses while some thread captures a graph, ending that capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Cudart& cuda) noexcept : cuda_(cuda) {
    cuda_.cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() { cuda_.cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Cudart& cuda_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

inline bool has_passed(const Cudart& cuda, cudaEvent_t event) {
  const RelaxedCapture relaxed(cuda);
  const cudaError_t status = cuda.cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    cuda.cudaGetLastError();  // else whoever asks next would get this error
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_EVENT_HPP
