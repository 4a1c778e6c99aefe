#include "nccl/memory.hpp"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>

#include "abi/own_device.hpp"
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
  LastUse(const Cudart& cuda, int device, std::vector<cudaStream_t> users)
      : cuda_(cuda), device_(device), unmarked_(std::move(users)) {
    events_.reserve(unmarked_.size());
    mark_what_can_be();
  }
  ~LastUse() {
    for (cudaEvent_t event : events_) on_own_device(cuda_, device_, cuda_.cudaEventDestroy, event);
  }
  LastUse(const LastUse&) = delete;
  LastUse& operator=(const LastUse&) = delete;

  // Whether all points are marked. The legacy default stream has to wait for the end of a capture that it
  // would spoil, which may in turn wait for this thread.
  bool is_marked() const { return unmarked_.empty(); }

  bool has_passed() {
    mark_what_can_be();
    return is_marked() && std::all_of(events_.begin(), events_.end(),
                                      [this](cudaEvent_t event) { return nccl::has_passed(cuda_, event); });
  }

 private:
  void mark_what_can_be() {
    if (is_marked()) return;
    // This thread alone can mark its own default stream.
    if (std::find(unmarked_.begin(), unmarked_.end(), cudaStreamPerThread) != unmarked_.end()) {
      const DeviceGuard guard(cuda_, device_);
      return mark_on_this_thread();
    }
    std::exception_ptr error;
    run_on_own_device(cuda_, device_, [&] {
      try {
        mark_on_this_thread();
      } catch (const std::exception&) {
        error = std::current_exception();
      }
    });
    if (error != nullptr) std::rethrow_exception(error);
  }

  void mark_on_this_thread() {
    const auto is_settled = [this](cudaStream_t stream) {
      const Capture capture = capture_of(cuda_, stream);
      if (capture == Capture::none) mark(stream);  // what goes into a graph uses nothing now
      return capture != Capture::implicit;
    };
    unmarked_.erase(std::remove_if(unmarked_.begin(), unmarked_.end(), is_settled), unmarked_.end());
  }

  void mark(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    nccl::check(cuda_.cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    events_.push_back(event);
    nccl::check(cuda_.cudaEventRecord(event, stream), "cudaEventRecord");
  }

  const Cudart& cuda_;
  const int device_;
  std::vector<cudaStream_t> unmarked_;
  std::vector<cudaEvent_t> events_;
};

void free_now(const Cudart& cuda, int device, void* data, Patience& patience) {
  const ContextGuard guard(cuda, device);
  const auto lock = lock_patiently(device_lock(device), "ncclMemFree", patience);
  const RelaxedCapture relaxed(cuda);
  check(ncclMemFree(data), "ncclMemFree");
}

void free_once_passed(const Cudart& cuda, int device, void* data, std::shared_ptr<LastUse> use) {
  Reaper::instance().run([&cuda, device, data, use = std::move(use)] {
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
  const auto use = std::make_shared<LastUse>(cuda, device, users);
  if (!use->is_marked()) return free_once_passed(cuda, device, data, use);
  while (!use->has_passed()) patience.pause("ncclMemFree");
  free_now(cuda, device, data, patience);
}

void free_later(const Cudart& cuda, int device, void* data, const std::vector<cudaStream_t>& users) noexcept {
  try {
    free_once_passed(cuda, device, data, std::make_shared<LastUse>(cuda, device, users));
  } catch (const std::exception&) {  // a device that fails does not get its memory back
  }
}

}  // namespace ferro::nccl
