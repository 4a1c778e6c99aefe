// NCCL allows no two calls at once on one communicator, nor on communicators of one
// device: whoever calls it holds the lock of the device.
#ifndef FERRO_NCCL_DEVICE_LOCK_HPP
#define FERRO_NCCL_DEVICE_LOCK_HPP

#include <map>
#include <mutex>

#include "nccl/patience.hpp"

namespace ferro::nccl {

// Held for the duration of a call of NCCL, never while waiting for other ranks. Taken without
// holding the interpreter's lock. The locks live as long as the process: threads may hold them
// to the end.
inline std::mutex& device_lock(int device) {
  static auto& guard = *new std::mutex;
  static auto& locks = *new std::map<int, std::mutex>;
  const std::lock_guard<std::mutex> lock(guard);
  return locks[device];
}

// Takes the lock for a call of `function`. Not for ever, since whoever has it may hang inside NCCL.
inline std::unique_lock<std::mutex> lock_patiently(std::mutex& device_lock, const char* function,
                                                   Patience& patience) {
  std::unique_lock<std::mutex> lock(device_lock, std::defer_lock);
  while (!lock.try_lock()) patience.pause(function);
  return lock;
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_DEVICE_LOCK_HPP
