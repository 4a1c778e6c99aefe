// A call of the engine as Python makes it: with the interpreter lock held until
// the engine says that this may take a while, and with Ctrl-C heard while it does.
#ifndef FERRO_PYTHON_CALL_HPP
#define FERRO_PYTHON_CALL_HPP

#include <Python.h>

#include <memory>
#include <utility>
#include <vector>

#include "abi/alarm.hpp"
#include "ferro/communicator.hpp"
#include "interpreter_lock.hpp"

namespace ferro::python {

// Letting go of the lock and taking it back costs as much as a small collective,
// so it is left to the engine to ask for it. The destructor takes the lock back,
// also for an exception on its way to the handler that turns it into Python's.
class PythonCall {
 public:
  explicit PythonCall(double timeout_s, Communicator* communicator = nullptr)
      : call_(timeout_s, {begin_blocking, interrupted, this}), communicator_(communicator) {}
  ~PythonCall() {
    if (closes_) communicator_->close();
    if (released_ != nullptr) take_lock(released_);
    if (type_ != nullptr) PyErr_Restore(type_, value_, traceback_);
  }
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;

  Call& get() { return call_; }
  void release_lock() { call_.begin_blocking(); }

  // If this thread runs a signal handler inside calls of `communicator`, has the first of them
  // close it once it has ended, and returns true.
  static bool closes_later(const Communicator* communicator) {
    PythonCall* outermost = nullptr;
    for (PythonCall* call = innermost; call != nullptr; call = call->outer_)
      if (call->communicator_ == communicator) outermost = call;
    if (outermost != nullptr) outermost->closes_ = true;
    return outermost != nullptr;
  }

 private:
  static void take_lock(PyThreadState* state) noexcept {
    if (InterpreterExit::concerns_this_thread()) InterpreterExit::wait();
    python::take_lock([state] { PyEval_RestoreThread(state); });
  }
  static void begin_blocking(void* self) noexcept {
    static_cast<PythonCall*>(self)->released_ = PyEval_SaveThread();
  }
  // Runs Python's signal handlers; true if one raised. The exception is kept until the call ends.
  static bool interrupted(void* self) noexcept {
    // The thread that ends the interpreter may be waiting for the call to end, and signals are for
    // the main thread anyway.
    if (InterpreterExit::concerns_this_thread()) return false;
    auto* call = static_cast<PythonCall*>(self);
    take_lock(call->released_);
    call->outer_ = std::exchange(innermost, call);
    const bool has_raised = PyErr_CheckSignals() != 0;
    innermost = call->outer_;
    if (has_raised) PyErr_Fetch(&call->type_, &call->value_, &call->traceback_);
    call->released_ = PyEval_SaveThread();
    return has_raised;
  }

  static inline thread_local PythonCall* innermost = nullptr;  // of those that run signal handlers

  Call call_;
  Communicator* const communicator_;  // null if the call keeps no other out of the group
  bool closes_ = false;               // a handler that it has run closed the group
  PythonCall* outer_ = nullptr;
  PyThreadState* released_ = nullptr;
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
};

inline void run(const std::shared_ptr<Communicator>& communicator, const Collective& collective,
                double timeout_s) {
  PythonCall call(timeout_s, communicator.get());
  communicator->run(call.get(), collective);
}

inline void exchange(const std::shared_ptr<Communicator>& communicator, Op op,
                     const std::vector<PointToPoint>& messages, double timeout_s) {
  PythonCall call(timeout_s, communicator.get());
  communicator->exchange(call.get(), op, messages);
}

inline void wait(const std::shared_ptr<Communicator>& communicator, const std::shared_ptr<Task>& task,
                 double timeout_s) {
  PythonCall call(timeout_s);
  communicator->wait(call.get(), *task);
}

inline void* allocate(const std::shared_ptr<Heap>& heap, std::size_t nbytes) {
  PythonCall call(kUnlimited);
  call.release_lock();  // backing memory takes a while, and another thread may hold the heap's lock for it
  return heap->allocate(call.get(), nbytes);
}

inline void begin_exit() noexcept { InterpreterExit::begin(); }

// For a connection of the same ranks that learns less about the end of one: NCCL's.
inline Alarm alarm_of(const std::shared_ptr<Communicator>& communicator) {
  return [weak = std::weak_ptr<Communicator>(communicator)] {
    const auto group = weak.lock();
    if (group == nullptr) return Loss{};
    const AbortReason reason = group->aborted();
    if (reason.code == ErrorCode::none) return Loss{};
    const bool is_lost = reason.code == ErrorCode::peer_lost || reason.code == ErrorCode::unreachable;
    return Loss{reason.culprit < 0 ? reason.reporter : reason.culprit, is_lost};
  };
}

// Whether this rank has left the group: from then on the engine uses no array of the caller's.
inline bool close(const std::shared_ptr<Communicator>& communicator) {
  PythonCall call(0);
  call.release_lock();  // other threads may need it to end their calls
  if (!PythonCall::closes_later(communicator.get())) return communicator->close();
  communicator->begin_close();  // the rest would wait for the call that we are in
  return false;
}

}  // namespace ferro::python

#endif  // FERRO_PYTHON_CALL_HPP
