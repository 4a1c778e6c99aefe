// Memory, registration, windows, pre-multiplied sums, statistics; versions and words of
// errors; what controls the emulation.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "emulation/nccl/calls.hpp"
#include "emulation/nccl/cudart_functions.hpp"
#include "emulation/nccl/element.hpp"
#include "emulation/nccl/group.hpp"
#include "emulation/nccl/version.hpp"

using namespace emulation;

namespace {

// To what ncclMemAlloc rounds up: to the alignment of windows; before 2.26, on GPUs that support
// multicast, to the recommended granularity of multicast objects.
std::size_t allocation_unit() {
  constexpr std::size_t multicast_unit = std::size_t{512} << 20;
  return loaded_version() < 22600 ? multicast_unit : NCCL_WIN_REQUIRED_ALIGNMENT;
}

// How much memory a communicator is said to take, so that a program reads a plausible number.
constexpr std::uint64_t kSuspendableNbytes = std::uint64_t{4} << 20;
constexpr std::uint64_t kPersistentNbytes = std::uint64_t{1} << 20;

void require_device_range(const char* function, const void* data, std::size_t nbytes) {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  int device = 0;
  require(data != nullptr && cudart().device_range(data, &begin, &end, &device) > 0, ncclInvalidArgument,
          function, ": ", data, " is not memory of a device");
  require(nbytes <= end - reinterpret_cast<std::uintptr_t>(data), ncclInvalidArgument, function, ": ", nbytes,
          " bytes at ", data, " reach past the end of the allocation");
}

// A real NCCL unmaps it, whatever still uses it.
void require_unused(const UseToken& token, const char* function) {
  if (token.use_count() > 1) {
    die(function, " while an operation uses the memory: wait for its stream first");
  }
}

// What registered memory takes on the device. There is none here, but what may not be done in a capture
// may not be done for it either.
void give_back_mappings(int device) {
  check(cudart().set_device(device));  // and left so, as the real one may
  check(cudart().free(nullptr));
}

struct WindowOffer {
  std::uint64_t nbytes;
  std::int64_t flags;
};

void register_window(Communicator& communicator, const std::shared_ptr<Window>& window, std::size_t nbytes,
                     int flags) {
  const WindowOffer mine{nbytes, flags};
  std::vector<WindowOffer> all(static_cast<std::size_t>(communicator.num_ranks));
  communicator.window_service().add(window->number, window->base);
  communicator.segment().exchange(&mine, sizeof mine, all.data(), communicator.stop());
  for (const WindowOffer& offer : all) {
    require(offer.flags == flags, ncclInvalidArgument, "ncclCommWindowRegister: the ranks' flags differ");
    window->nbytes.push_back(offer.nbytes);
  }
}

// All ranks do it together. What cannot be done is noticed in the job, and so stays the error of a
// communicator that does not block.
ncclResult_t set_suspended(ncclComm_t comm, bool is_suspended, const char* function) {
  const Use use(comm, function);
  use->require_ready(function);
  require(!use->shares_resources(), ncclInvalidUsage, function,
          ": not of a communicator that shares resources with another");
  const CommunicatorPtr communicator = use.get();
  return submit(communicator, [=] {
    require(communicator->is_suspended != is_suspended, ncclInvalidUsage, function,
            ": the communicator is so already");
    communicator->segment().barrier(Barrier::control, communicator->stop());
    communicator->is_suspended = is_suspended;
  });
}

// What ncclMemAlloc has given out, by address. Windows need memory like it: of other memory the driver has
// no handle to give to other ranks.
class NcclMemory {
 public:
  void add(void* data, std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    nbytes_[reinterpret_cast<std::uintptr_t>(data)] = nbytes;
  }
  void remove(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    nbytes_.erase(reinterpret_cast<std::uintptr_t>(data));
  }
  bool contains(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const auto after = nbytes_.upper_bound(address);
    return after != nbytes_.begin() && address - std::prev(after)->first < std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> nbytes_;
};

NcclMemory& nccl_memory() {
  static NcclMemory& memory = *new NcclMemory;
  return memory;
}

std::uint64_t statistic(const Communicator& communicator, ncclCommMemStat_t stat) {
  switch (stat) {
    case ncclStatGpuMemSuspend:
      return kSuspendableNbytes;
    case ncclStatGpuMemSuspended:
      return communicator.is_suspended ? 1 : 0;
    case ncclStatGpuMemPersist:
      return kPersistentNbytes;
    case ncclStatGpuMemTotal:
      return kSuspendableNbytes + kPersistentNbytes;
  }
  fail(ncclInvalidArgument, "ncclCommMemStats: there is no statistic ", static_cast<int>(stat));
}

}  // namespace

EMULATION_API ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = loaded_version();
  return ncclSuccess;
}

EMULATION_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclTimeout:
      return "operation timed out";
    default:
      return "unknown result code";
  }
}

// The process's last error: like the real one, it does not look at the communicator.
EMULATION_API const char* ncclGetLastError(ncclComm_t) { return last_error(); }

EMULATION_API ncclResult_t ncclMemAlloc(void** data, std::size_t nbytes) {
  return guarded([&] {
    require(data != nullptr, ncclInvalidArgument, "ncclMemAlloc: the result is NULL");
    const Fault fault = fault_plan().next("mem_alloc");
    require(fault.act != Act::out_of_memory, ncclUnhandledCudaError, "ncclMemAlloc: out of memory");
    const std::size_t unit = allocation_unit();
    check(cudart().malloc(data, (nbytes + unit - 1) / unit * unit));
    nccl_memory().add(*data, nbytes);
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclMemFree(void* data) {
  return guarded([&] {
    fault_plan().next("mem_free");
    require_context("ncclMemFree");
    nccl_memory().remove(data);
    check(cudart().free(data));
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, std::size_t nbytes,
                                            void** handle) {
  return guarded([&] {
    const Use use(comm, "ncclCommRegister");
    use->require_usable("ncclCommRegister");
    require(handle != nullptr, ncclInvalidArgument, "ncclCommRegister: the handle is NULL");
    require_context("ncclCommRegister");
    require_device_range("ncclCommRegister", data, nbytes);
    *handle = reinterpret_cast<void*>(use->registrations.size() + 1);
    while (use->registrations.count(*handle) > 0) *handle = static_cast<char*>(*handle) + 1;
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    use->registrations[*handle] = {std::make_shared<int>(), begin, begin + nbytes};
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return guarded([&] {
    const Use use(comm, "ncclCommDeregister");
    use->require_ready("ncclCommDeregister");
    fault_plan().next("deregister", use->rank);
    const auto found = use->registrations.find(handle);
    require(found != use->registrations.end(), ncclInvalidUsage, "ncclCommDeregister: no such handle");
    require_unused(found->second.token, "ncclCommDeregister");
    use->registrations.erase(found);
    give_back_mappings(use->device);
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, std::size_t nbytes,
                                                  ncclWindow_t* out, int flags) {
  return guarded([&] {
    const Use use(comm, "ncclCommWindowRegister");
    use->require_usable("ncclCommWindowRegister");
    require(out != nullptr, ncclInvalidArgument, "ncclCommWindowRegister: the window is NULL");
    *out = nullptr;
    if (!has_windows()) return ncclSuccess;
    require_device_range("ncclCommWindowRegister", data, nbytes);
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const CommunicatorPtr communicator = use.get();
    const auto window = std::make_shared<Window>();
    window->number = ++communicator->num_windows;
    window->base = static_cast<char*>(data);
    window->is_symmetric = (flags & NCCL_WIN_COLL_SYMMETRIC) != 0;
    // Unlike those of other communicators: a window used with the wrong one is found.
    static std::atomic<std::uintptr_t> last{std::uintptr_t{0x6eaa} << 48};
    const auto handle = reinterpret_cast<ncclWindow_t>(last.fetch_add(16, std::memory_order_relaxed) + 16);
    communicator->windows[handle] = window;
    const Fault fault = fault_plan().next("register", communicator->rank);
    const ncclResult_t result = submit(communicator, [=] {
      suffer(fault, "ncclCommWindowRegister", *communicator);
      require(nccl_memory().contains(data), ncclUnhandledCudaError,
              "ncclCommWindowRegister: the memory was not allocated with ncclMemAlloc");
      require(address % NCCL_WIN_REQUIRED_ALIGNMENT == 0, ncclInvalidArgument,
              "ncclCommWindowRegister: a window begins at a multiple of ", NCCL_WIN_REQUIRED_ALIGNMENT,
              " bytes");
      register_window(*communicator, window, nbytes, flags);
      *out = handle;
    });
    return result == ncclInProgress ? ncclSuccess : result;  // as the real one, which has only begun
  });
}

EMULATION_API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t handle) {
  return guarded([&] {
    const Use use(comm, "ncclCommWindowDeregister");
    use->require_ready("ncclCommWindowDeregister");
    const auto found = use->windows.find(handle);
    require(found != use->windows.end(), ncclInvalidArgument, "ncclCommWindowDeregister: no such window");
    require_unused(found->second->token, "ncclCommWindowDeregister");
    use->window_service().remove(found->second->number);
    use->windows.erase(found);
    give_back_mappings(use->device);
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                                    ncclScalarResidence_t residence, ncclComm_t comm) {
  return guarded([&] {
    const Use use(comm, "ncclRedOpCreatePreMulSum");
    use->require_usable("ncclRedOpCreatePreMulSum");
    require(op != nullptr && scalar != nullptr && dtype >= 0 && dtype < ncclNumTypes, ncclInvalidArgument,
            "ncclRedOpCreatePreMulSum: no result, no scalar, or no such dtype");
    Multiplier multiplier;
    multiplier.dtype = dtype;
    if (residence == ncclScalarDevice) {
      multiplier.device_scalar = scalar;
    } else {
      std::memcpy(multiplier.scalar, scalar, element_nbytes(dtype));
    }
    // Different from those of all other communicators of the process, so that one used with the wrong
    // communicator is caught.
    static std::atomic<int> last{ncclNumOps - 1};
    const int number = last.fetch_add(1, std::memory_order_relaxed) + 1;
    use->multipliers[number] = multiplier;
    *op = static_cast<ncclRedOp_t>(number);
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return guarded([&] {
    const Use use(comm, "ncclRedOpDestroy");
    require(use->multipliers.erase(op) == 1, ncclInvalidArgument, "ncclRedOpDestroy: no such operation");
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  return guarded([&] {
    require(flags == NCCL_SUSPEND_MEM, ncclInvalidArgument,
            "ncclCommSuspend: flags must be NCCL_SUSPEND_MEM");
    return set_suspended(comm, true, "ncclCommSuspend");
  });
}

EMULATION_API ncclResult_t ncclCommResume(ncclComm_t comm) {
  return guarded([&] { return set_suspended(comm, false, "ncclCommResume"); });
}

EMULATION_API ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, std::uint64_t* value) {
  return guarded([&] {
    const Use use(comm, "ncclCommMemStats");
    use->require_ready("ncclCommMemStats");
    require(value != nullptr, ncclInvalidArgument, "ncclCommMemStats: the result is NULL");
    *value = statistic(*use, stat);
    return ncclSuccess;
  });
}

// Tells the library from a real one.
EMULATION_API int ferroEmulationIsEmulated() { return 1; }

// Replaces FERRO_EMULATION_FAULT from now on, and counts from 1 again. 0 if understood.
EMULATION_API int ferroEmulationSetFaults(const char* plan) {
  return fault_plan().set(plan == nullptr ? "" : plan) ? 0 : -1;
}

// How many calls do not return, as FERRO_EMULATION_FAULT asked for.
EMULATION_API int ferroEmulationCountStuck() { return fault_plan().num_stuck(); }
