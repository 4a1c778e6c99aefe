// What a thread may do while a CUDA graph is captured, and which streams take work then.
#ifndef FERRO_ABI_STREAM_CAPTURE_HPP
#define FERRO_ABI_STREAM_CAPTURE_HPP

#include "abi/cudart_table.hpp"

namespace ferro {

// Lets this thread ask whether something is done, wait for it, allocate and free. Otherwise any of these
// ends captures that have nothing to do with it, those of other threads too.
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

// One such call.
template <typename... Parameters, typename... Arguments>
cudaError_t relaxed(const Cudart& cuda, cudaError_t (*function)(Parameters...),
                    Arguments... arguments) noexcept {
  const RelaxedCapture scope(cuda);
  return function(arguments...);
}

// What becomes of work that a stream is given now.
enum class Capture {
  none,      // it runs
  active,    // it goes into a graph
  implicit,  // it fails, and spoils a capture: this is the legacy default stream, and would wait for one
};

// Asks CUDA, which ends no capture. CUDA answers with an error for `implicit`, which is none here.
inline cudaError_t capture_of(const Cudart& cuda, cudaStream_t stream, Capture* capture) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cuda.cudaStreamIsCapturing(stream, &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    cuda.cudaGetLastError();  // else whoever asks next would get this error
    *capture = Capture::implicit;
    return cudaSuccess;
  }
  *capture = status == cudaStreamCaptureStatusNone ? Capture::none : Capture::active;
  return error;
}

}  // namespace ferro

#endif  // FERRO_ABI_STREAM_CAPTURE_HPP
