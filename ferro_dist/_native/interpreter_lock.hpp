// The interpreter's lock, as threads take it that wait in C++.
#ifndef FERRO_INTERPRETER_LOCK_HPP
#define FERRO_INTERPRETER_LOCK_HPP

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

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

// Runs Python's signal handlers in the middle of a wait without the lock; true if one raised.
inline bool is_interrupted(void*) noexcept {
  const PyGILState_STATE state = take_lock(PyGILState_Ensure);
  const bool has_raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return has_raised;
}

}  // namespace ferro::python

#endif  // FERRO_INTERPRETER_LOCK_HPP
