// A call of the engine as Python makes it: with the interpreter lock held until
// the engine says that this may take a while, and with Ctrl-C heard while it does.
#ifndef FERRO_PYTHON_CALL_HPP
#define FERRO_PYTHON_CALL_HPP

#include <Python.h>

#include <memory>
#include <vector>

#include "ferro/communicator.hpp"

namespace ferro::python {

// Letting go of the lock and taking it back costs as much as a small collective,
// so it is left to the engine to ask for it. The destructor takes the lock back,
// also on the way of an exception to the handler that turns it into Python's.
class PythonCall {
 public:
  explicit PythonCall(double timeout_s) : call_(timeout_s, {begin_blocking, interrupted, this}) {}
  ~PythonCall() {
    if (released_ != nullptr) PyEval_RestoreThread(released_);
    if (type_ != nullptr) PyErr_Restore(type_, value_, traceback_);
  }
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;

  Call& get() { return call_; }
  void release_lock() { call_.begin_blocking(); }

 private:
  static void begin_blocking(void* self) noexcept {
    static_cast<PythonCall*>(self)->released_ = PyEval_SaveThread();
  }
  // Runs Python's signal handlers; true if one raised. The exception is kept until the call ends.
  static bool interrupted(void* self) noexcept {
    auto* call = static_cast<PythonCall*>(self);
    PyEval_RestoreThread(call->released_);
    const bool has_raised = PyErr_CheckSignals() != 0;
    if (has_raised) PyErr_Fetch(&call->type_, &call->value_, &call->traceback_);
    call->released_ = PyEval_SaveThread();
    return has_raised;
  }

  Call call_;
  PyThreadState* released_ = nullptr;
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
};

inline void run(const std::shared_ptr<Communicator>& communicator, const Collective& collective,
                double timeout_s) {
  PythonCall call(timeout_s);
  communicator->run(call.get(), collective);
}

inline void exchange(const std::shared_ptr<Communicator>& communicator, Op op,
                     const std::vector<PointToPoint>& messages, double timeout_s) {
  PythonCall call(timeout_s);
  communicator->exchange(call.get(), op, messages);
}

// False if the time ran out first.
inline bool wait(const std::shared_ptr<Task>& task, double timeout_s) {
  PythonCall call(timeout_s);
  return task->wait(call.get());
}

inline void close(const std::shared_ptr<Communicator>& communicator) {
  PythonCall call(0);
  call.release_lock();  // other threads may need it to end their calls
  communicator->close();
}

}  // namespace ferro::python

#endif  // FERRO_PYTHON_CALL_HPP
