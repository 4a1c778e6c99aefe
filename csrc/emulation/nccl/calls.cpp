#include "emulation/nccl/calls.hpp"

#include <unistd.h>

#include <unordered_map>
#include <utility>

#include "emulation/nccl/group.hpp"

namespace emulation {
namespace {

constexpr std::uintptr_t kFirstHandle = std::uintptr_t{0x6ecc} << 48;

// Handles are made from a counter: one that has ended is never handed out again, and can be
// told from one that never existed.
struct Handles {
  std::mutex mutex;  // guards the rest
  std::unordered_map<std::uintptr_t, CommunicatorPtr> live;
  std::uintptr_t next = kFirstHandle;
};

Handles& handles() {
  static Handles& instance = *new Handles;
  return instance;
}

}  // namespace

ncclComm_t add_handle(const CommunicatorPtr& communicator) {
  const std::lock_guard<std::mutex> lock(handles().mutex);
  const std::uintptr_t handle = handles().next += 16;
  handles().live[handle] = communicator;
  return reinterpret_cast<ncclComm_t>(handle);
}

void end_handle(ncclComm_t handle, const char* function) {
  CommunicatorPtr dying;  // its destructor runs after the lock is let go
  const std::lock_guard<std::mutex> lock(handles().mutex);
  const auto found = handles().live.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == handles().live.end()) die(function, " on a communicator that was destroyed or aborted before");
  dying = std::move(found->second);
  handles().live.erase(found);
}

CommunicatorPtr find_communicator(ncclComm_t handle, const char* function) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  const std::lock_guard<std::mutex> lock(handles().mutex);
  const bool was_given = number > kFirstHandle && number <= handles().next && number % 16 == 0;
  require(was_given, ncclInvalidArgument, function, ": no communicator");
  const auto found = handles().live.find(number);
  if (found == handles().live.end()) die(function, " on a communicator that was destroyed or aborted before");
  if (found->second->pid != getpid()) {
    die(function, " in a forked child, on a communicator of its parent (process ", found->second->pid, ")");
  }
  return found->second;
}

Use::Use(CommunicatorPtr communicator, const char* function) : communicator_(std::move(communicator)) {
  std::thread::id nobody{};
  const std::thread::id self = std::this_thread::get_id();
  // Acquire and release: this thread sees what the one before it did in the communicator.
  if (communicator_->user.compare_exchange_strong(nobody, self, std::memory_order_acq_rel)) {
    is_outermost_ = true;
    communicator_->user_function.store(function, std::memory_order_relaxed);
  } else if (nobody != self) {
    const char* other = communicator_->user_function.load(std::memory_order_relaxed);
    die(function, " while another thread is inside ", other == nullptr ? "a call" : other,
        " on the same communicator (rank ", communicator_->rank, "): one call at a time");
  }
}

Use::~Use() {
  if (is_outermost_) communicator_->user.store({}, std::memory_order_release);
}

ncclResult_t remember(const Failure& failure) {
  set_last_error(failure.text);
  poison_group(failure.code);
  return failure.code;
}

}  // namespace emulation
