// The engine's own threads.
#ifndef FERRO_BACKGROUND_THREAD_HPP
#define FERRO_BACKGROUND_THREAD_HPP

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "ferro/error.hpp"

namespace ferro {

// Blocks all signals of the current thread for as long as the object lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t previous_;
};

// `name`, at most 15 characters, is what debuggers and top show. Signals belong to the caller's
// threads, which know what to do with them: the new thread inherits a mask that blocks them all.
// Throws Error{io} where the system allows no more threads.
template <class Body>
std::thread start_thread(const char* name, Body body) try {
  const BlockedSignals blocked;
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
} catch (const std::system_error& error) {
  throw Error(ErrorCode::io, -1,
              std::string("starting the thread ") + name + ": " + error.what() +
                  ": close other groups, or raise the limit (ulimit -u, a cgroup's pids.max)");
}

}  // namespace ferro

#endif  // FERRO_BACKGROUND_THREAD_HPP
