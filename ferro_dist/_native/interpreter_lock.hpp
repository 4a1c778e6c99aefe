// The interpreter's lock, as threads take it that wait in C++, up to the interpreter's end.
#ifndef FERRO_INTERPRETER_LOCK_HPP
#define FERRO_INTERPRETER_LOCK_HPP

#include <Python.h>
#include <cxxabi.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace ferro::python {

// Calls `take`, a function of Python's that takes the lock. A daemon thread that does so while the
// interpreter is going away is made to exit there and then, by unwinding its stack: through destructors,
// over arrays that others still use, and into handlers of all exceptions, which end the process. Instead
// it sleeps until the process ends, as later Pythons (3.14) have it themselves.
template <typename Take>
auto take_lock(Take take) noexcept {
  try {
    return take();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// The end of the interpreter. Daemon threads that wait in C++ are woken by then, since their groups are
// closed. But a thread that then returns to Python is ended by it: before Python 3.14 by unwinding its stack,
// and frames of other libraries (torch's) that forbid unwinding end the whole process. So such threads wait
// for the process to end first. They wait longer than the exit handlers take that end the groups, but not for
// ever: another handler may be waiting for them in turn. Each extension that includes this has an end of its
// own to begin.
class InterpreterExit {
 public:
  // Called by the thread that runs the exit handlers.
  static void begin() noexcept {
    thread = pthread_self();
    is_near.store(true, std::memory_order_release);
  }
  static bool concerns_this_thread() noexcept {
    return is_near.load(std::memory_order_acquire) && pthread_equal(thread, pthread_self()) == 0;
  }
  static void wait() noexcept { std::this_thread::sleep_for(kPatience); }

 private:
  static constexpr std::chrono::seconds kPatience{10};
  static inline std::atomic<bool> is_near{false};
  static inline pthread_t thread;  // written before is_near
};

// For a thread that has the lock, and an error to raise that may be due to the interpreter's end.
inline void wait_at_exit() noexcept {
  if (!InterpreterExit::concerns_this_thread()) return;
  PyThreadState* const state = PyEval_SaveThread();
  InterpreterExit::wait();
  take_lock([state] { PyEval_RestoreThread(state); });
}

// Runs Python's signal handlers in the middle of a wait without the lock; true if one raised.
inline bool is_interrupted(void*) noexcept {
  const PyGILState_STATE state = take_lock(PyGILState_Ensure);
  const bool has_raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return has_raised;
}

}  // namespace ferro::python

#endif  // FERRO_INTERPRETER_LOCK_HPP
