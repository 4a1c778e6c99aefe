// The group that a thread is collecting operations for.
#ifndef FERRO_NCCL_RECORDING_HPP
#define FERRO_NCCL_RECORDING_HPP

namespace ferro::nccl {

// The Python object, borrowed from whoever opened it; null outside a group.
inline void*& current_group() noexcept {
  static thread_local void* group = nullptr;
  return group;
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_RECORDING_HPP
