#include "nccl/memory.hpp"

#include <mutex>

#include "nccl/device_guard.hpp"
#include "nccl/device_lock.hpp"
#include "nccl/library.hpp"
#include "nccl/reaper.hpp"

namespace ferro::nccl {
namespace {

void check(ncclResult_t result, const char* function) {
  if (result != ncclSuccess) throw error_of(function, result, nullptr);
}

}  // namespace

void* allocate(const Cudart& cuda, int device, std::size_t nbytes, Patience& patience) {
  void* data = nullptr;
  const DeviceGuard guard(cuda, device);
  const auto lock = lock_patiently(device_lock(device), "ncclMemAlloc", patience);
  check(ncclMemAlloc(&data, nbytes), "ncclMemAlloc");
  return data;
}

void free(const Cudart& cuda, int device, void* data, Patience& patience) {
  const DeviceGuard guard(cuda, device);
  const auto lock = lock_patiently(device_lock(device), "ncclMemFree", patience);
  check(ncclMemFree(data), "ncclMemFree");
}

void free_later(const Cudart& cuda, int device, void* data) noexcept {
  Reaper::instance().run([&cuda, device, data] {
    Patience none(0);
    try {
      free(cuda, device, data, none);
      return true;
    } catch (const Error& error) {  // nobody is left to be told
      return error.kind != ErrorKind::timeout;
    }
  });
}

}  // namespace ferro::nccl
