// The engine's own threads.
#ifndef FERRO_BACKGROUND_THREAD_HPP
#define FERRO_BACKGROUND_THREAD_HPP

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

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
template <class Body>
std::thread start_thread(const char* name, Body body) {
  const BlockedSignals blocked;
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace ferro

#endif  // FERRO_BACKGROUND_THREAD_HPP
