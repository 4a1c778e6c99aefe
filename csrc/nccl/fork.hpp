// Tells a process from the one it was forked from, whose communicators, locks and
// threads it has only dead copies of.
#ifndef FERRO_NCCL_FORK_HPP
#define FERRO_NCCL_FORK_HPP

#include <pthread.h>

namespace ferro::nccl {

// How often this process was forked from another; asking costs a load, where
// getpid() is a system call. Visible, of which GCC makes one in the process: the module that
// makes an object and the one that asks whether it is this process's may differ.
__attribute__((visibility("default"))) inline int& num_forks() noexcept {
  static int count = (pthread_atfork(nullptr, nullptr, [] { ++num_forks(); }), 0);
  return count;
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_FORK_HPP
