#include "nccl/memory.hpp"

#include <algorithm>
#include <memory>
#include <mutex>

#include "nccl/device_guard.hpp"
#include "nccl/device_lock.hpp"
#include "nccl/event.hpp"
#include "nccl/fork.hpp"
#include "nccl/library.hpp"
#include "nccl/reaper.hpp"

namespace ferro::nccl {
namespace {

void check(ncclResult_t result, const char* function) {
  if (result != ncclSuccess) throw error_of(function, result, nullptr);
}

// The points in the streams from which on nobody uses the memory any more.
class LastUse {
 public:
  LastUse(const Cudart& cuda, int device, const std::vector<cudaStream_t>& users) : cuda_(cuda) {
    const DeviceGuard guard(cuda, device);
    for (cudaStream_t stream : users)
      if (!is_captured(stream)) mark(stream);
  }
  ~LastUse() {
    for (cudaEvent_t event : events_) cuda_.cudaEventDestroy(event);
  }
  LastUse(const LastUse&) = delete;
  LastUse& operator=(const LastUse&) = delete;

  bool has_passed() const {
    return std::all_of(events_.begin(), events_.end(),
                       [this](cudaEvent_t event) { return nccl::has_passed(cuda_, event); });
  }

 private:
  // What goes into a graph uses nothing now. CUDA does not tell whether the default stream is captured
  // while another one is that it would wait for.
  bool is_captured(cudaStream_t stream) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cuda_.cudaStreamIsCapturing(stream, &status) == cudaSuccess)
      return status != cudaStreamCaptureStatusNone;
    cuda_.cudaGetLastError();  // else it would be the next one's who asks
    return true;
  }

  void mark(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    nccl::check(cuda_.cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    events_.push_back(event);
    nccl::check(cuda_.cudaEventRecord(event, stream), "cudaEventRecord");
  }

  const Cudart& cuda_;
  std::vector<cudaEvent_t> events_;
};

void free_now(const Cudart& cuda, int device, void* data, Patience& patience) {
  const DeviceGuard guard(cuda, device);
  const auto lock = lock_patiently(device_lock(device), "ncclMemFree", patience);
  const RelaxedCapture relaxed(cuda);
  check(ncclMemFree(data), "ncclMemFree");
}

}  // namespace

void* allocate(const Cudart& cuda, int device, std::size_t nbytes, Patience& patience) {
  if (is_forked_copy()) throw Error(ErrorKind::forked);
  void* data = nullptr;
  const DeviceGuard guard(cuda, device);
  const auto lock = lock_patiently(device_lock(device), "ncclMemAlloc", patience);
  const RelaxedCapture relaxed(cuda);  // where GPUs have no cuMem, NCCL calls cudaMalloc
  check(ncclMemAlloc(&data, nbytes), "ncclMemAlloc");
  return data;
}

void free(const Cudart& cuda, int device, void* data, const std::vector<cudaStream_t>& users,
          Patience& patience) {
  const LastUse use(cuda, device, users);
  while (!use.has_passed()) patience.pause("ncclMemFree");
  free_now(cuda, device, data, patience);
}

void free_later(const Cudart& cuda, int device, void* data, const std::vector<cudaStream_t>& users) noexcept {
  try {
    const auto use = std::make_shared<const LastUse>(cuda, device, users);
    Reaper::instance().run([&cuda, device, data, use] {
      stay_on_device(cuda, device);
      Patience none(0);
      try {
        if (!use->has_passed()) return false;
        free_now(cuda, device, data, none);
        return true;
      } catch (const Error& error) {  // nobody is left to be told
        return error.kind != ErrorKind::timeout;
      }
    });
  } catch (const std::exception&) {  // a device that fails does not get its memory back
  }
}

}  // namespace ferro::nccl
