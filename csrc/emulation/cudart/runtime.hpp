// The state of the emulated CUDA runtime of this process.
#ifndef EMULATION_CUDART_RUNTIME_HPP
#define EMULATION_CUDART_RUNTIME_HPP

#include <sys/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "emulation/cudart/cuda_abi.hpp"
#include "emulation/cudart/graph.hpp"
#include "emulation/cudart/memory.hpp"
#include "emulation/cudart/stream.hpp"
#include "emulation/fault_plan.hpp"

namespace emulation {

// Thrown inside the library, returned at its border.
struct Failure {
  cudaError_t code;
};

// Handles are made from a counter, so that no new object gets the handle of a destroyed one;
// they are far from any valid address, so that dereferencing one faults.
template <class Handle, class Object>
class HandleTable {
 public:
  Handle add(Object object) {
    const auto handle = next_handle();
    objects_[handle] = std::move(object);
    return handle;
  }
  Handle next_handle() { return reinterpret_cast<Handle>(next_ += 16); }
  void put(Handle handle, Object object) { objects_[handle] = std::move(object); }
  Object get(Handle handle) const {
    const auto found = objects_.find(handle);
    if (found == objects_.end()) throw Failure{cudaErrorInvalidResourceHandle};
    return found->second;
  }
  Object take(Handle handle) {
    Object object = get(handle);
    objects_.erase(handle);
    return object;
  }

 private:
  std::uintptr_t next_ = std::uintptr_t{0x6eed} << 48;
  std::unordered_map<Handle, Object> objects_;
};

struct Event {
  unsigned flags = 0;
  int device = 0;
  MilestonePtr milestone;         // of the last record outside of a capture
  CapturePtr capture;             // of the last record, if that was inside of one
  std::vector<std::size_t> tail;  // the nodes that it stands for
};
using EventPtr = std::shared_ptr<Event>;

struct Runtime {
  Runtime();

  const int num_devices;
  Memory memory;
  FaultPlan faults;
  const pid_t pid;
  // By device: whether some call has made a context on it.
  std::vector<std::atomic<bool>> contexts;

  // Guards all below, every Event, Graph and Capture, and the order in which operations
  // are submitted. Never held during a wait.
  std::mutex mutex;
  HandleTable<cudaStream_t, StreamPtr> streams;
  HandleTable<cudaEvent_t, EventPtr> events;
  HandleTable<cudaGraph_t, GraphPtr> graphs;
  HandleTable<cudaGraphExec_t, GraphPtr> executables;
  HandleTable<cudaUserObject_t, std::shared_ptr<UserObject>> objects;
  std::vector<StreamPtr> legacy;               // by device, null until used
  std::vector<std::weak_ptr<Stream>> running;  // every stream that was started
  std::vector<CapturePtr> captures;            // those in progress
};

// Never destroyed: threads of streams outlive main().
Runtime& runtime();

// The device of the calling thread.
int& current_device();
// Makes a context on the current device, as most calls do first: on a GPU it takes hundreds
// of megabytes.
void make_context();
// Whether the calling thread has one: the driver itself, which makes none, answers no thread without.
bool& thread_has_context();
cudaStreamCaptureMode& capture_mode_of_thread();

// Whether this is a name of the legacy default stream.
inline bool is_legacy(cudaStream_t handle) { return handle == nullptr || handle == cudaStreamLegacy; }
// Under the runtime's lock.
StreamPtr find_stream(cudaStream_t handle);
std::vector<StreamPtr> live_streams(int device);

// Gives an operation to a stream, or to the graph that the stream is captured into;
// orders it with the legacy default stream. Under the runtime's lock. Returns null if captured.
MilestonePtr enqueue(const StreamPtr& stream, Operation operation);

// Whether an operation given to the stream now would have nothing to wait for. Under the lock.
bool is_idle(const StreamPtr& stream);

// For calls that may wait for a stream that is being captured, or depend on it: they end the
// capture with cudaErrorStreamCaptureUnsupported, as on a GPU. Under the runtime's lock.
void refuse_during_capture();

cudaError_t remember(cudaError_t error);
void install_fault_report();

// The body of every function of the library.
template <class Body>
cudaError_t guarded(Body body) noexcept {
  try {
    // As after a fork on a GPU: nothing of CUDA works in the child.
    if (getpid() != runtime().pid) return remember(cudaErrorInitializationError);
    body();
    return cudaSuccess;
  } catch (const Failure& failure) {
    return remember(failure.code);
  } catch (const std::bad_alloc&) {
    return remember(cudaErrorMemoryAllocation);
  } catch (...) {
    return remember(cudaErrorUnknown);
  }
}

inline void require(bool condition, cudaError_t otherwise = cudaErrorInvalidValue) {
  if (!condition) throw Failure{otherwise};
}

}  // namespace emulation

#endif  // EMULATION_CUDART_RUNTIME_HPP
