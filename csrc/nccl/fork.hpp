// Tells a process from the one it was forked from, whose communicators, locks and
// threads it has only dead copies of.
#ifndef FERRO_NCCL_FORK_HPP
#define FERRO_NCCL_FORK_HPP

#include <pthread.h>

namespace ferro::nccl {

// How often this process was forked from another since somebody first asked; to ask again costs
// a load, where getpid() is a system call. Hidden: each library that includes this has a count of
// its own. What makes an object and what asks whether it is this process's ask the same one:
// libferro_nccl its own, the modules above it that of cuda_runtime.
__attribute__((visibility("hidden"))) inline int& num_forks() noexcept {
  static int count = (pthread_atfork(nullptr, nullptr, [] { ++num_forks(); }), 0);
  return count;
}

// Whether this process was forked from one that had asked this before: a child of a process that
// has used NCCL has neither its threads nor a CUDA that works.
__attribute__((visibility("hidden"))) inline bool is_forked_copy() noexcept {
  static const int first_use = num_forks();
  return first_use != num_forks();
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_FORK_HPP
