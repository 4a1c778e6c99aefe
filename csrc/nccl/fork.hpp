// Tells a process from the one that it was forked from, of whose communicators, locks and
// threads it has only dead copies.
#ifndef FERRO_NCCL_FORK_HPP
#define FERRO_NCCL_FORK_HPP

#include <pthread.h>

namespace ferro::nccl {

// How many forks have led to this process since somebody first asked. Asking again costs a load,
// where getpid() is a system call. Hidden: each library that includes this has a count of its own.
// Whoever makes an object and whoever asks whether it belongs to this process must use the same
// count: libferro_nccl uses its own, the modules above it that of cuda_runtime.
__attribute__((visibility("hidden"))) inline int& num_forks() noexcept {
  static int count = (pthread_atfork(nullptr, nullptr, [] { ++num_forks(); }), 0);
  return count;
}

// Whether this process was forked from one that had asked this before: the child of a process that
// has used NCCL has neither that one's threads nor a CUDA that works.
__attribute__((visibility("hidden"))) inline bool is_forked_copy() noexcept {
  static const int first_use = num_forks();
  return first_use != num_forks();
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_FORK_HPP
