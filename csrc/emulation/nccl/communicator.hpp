// One rank's side of a communicator.
//
// Calls that talk to other ranks are jobs: a blocking communicator carries them out at
// once, a non-blocking one in a thread of their own while its state is ncclInProgress. What is
// launched into streams runs in the streams' threads, one launch of a communicator after another.
#ifndef EMULATION_NCCL_COMMUNICATOR_HPP
#define EMULATION_NCCL_COMMUNICATOR_HPP

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "emulation/cudart/cuda_abi.hpp"
#include "emulation/fault_plan.hpp"
#include "emulation/nccl/bootstrap.hpp"
#include "emulation/nccl/segment.hpp"
#include "emulation/nccl/window.hpp"

namespace emulation {

// A pre-multiplied sum.
struct Multiplier {
  ncclDataType_t dtype = ncclFloat32;
  unsigned char scalar[16] = {};
  const void* device_scalar = nullptr;  // read when the operation runs, if not null
};

// Memory of which ncclCommRegister was told.
struct Registration {
  UseToken token;
  std::uintptr_t begin;
  std::uintptr_t end;
};

// An id under which ranks can join, and the number of the child that they will be part of.
struct Growth {
  ncclUniqueId id;
  std::uint64_t child;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(const ncclUniqueId& id, int rank, int num_ranks, int device, const ncclConfig_t& config)
      : rank(rank), num_ranks(num_ranks), id(id), device(device), config(config) {}
  ~Communicator();

  // Set before any other call can be made: by init at once, by split as soon as they are known.
  int rank;
  int num_ranks;
  ncclUniqueId id;
  const int device;
  const ncclConfig_t config;
  bool is_blocking() const { return config.blocking != 0 || is_ending; }

  // Carries out `job`, now or in a thread. If it fails, that becomes the async error, and
  // a blocking communicator throws it. Returns ncclInProgress or ncclSuccess.
  ncclResult_t run(std::function<void()> job);
  // The state that ncclCommGetAsyncError reports.
  ncclResult_t state();
  void fail_later(ncclResult_t code, const std::string& text);
  void forget_error();  // shrink goes on from a communicator in error
  // Throws unless the communicator can take another call, or be used for communication.
  void require_ready(const char* function);
  void require_usable(const char* function);
  void require_not_finalized(const char* function);

  // Around the making of a child: this communicator is in progress meanwhile, and aborting it
  // aborts the child, too.
  void begin_child(const std::shared_ptr<Communicator>& child);
  void end_child();

  // The jobs.
  void connect();
  void finalize();
  void revoke();
  void stop_operations();  // those in flight end unfinished
  // And those of communicators that share resources with this one.
  void stop_all_operations();
  // Ends everything, from any thread; the destructor is free to run afterwards.
  void abort();
  // Waits for graphs that captured the communicator.
  void await_graphs(const char* function);
  // Records that both share resources, so that what stops the work of one stops that of both.
  void share_with(const std::shared_ptr<Communicator>& other);
  bool shares_resources() const;
  // Throws if another thread is launching on a communicator that shares resources with this one, and is no
  // part of the same group.
  void require_no_race(const std::vector<const Communicator*>& group);
  // Waits for the communicator's work, in the calling thread. Like any such wait it is refused while
  // another thread captures a graph, and invalidates the capture.
  void synchronize();
  // Gives the shared memory back: the last step of ncclCommDestroy and of ncclCommAbort.
  void release();
  // A number that is the same on all ranks that call it equally often.
  std::uint64_t next_successor() { return ++num_successors_; }

  Segment& segment() { return *segment_; }
  WindowService& window_service();  // started by the first call

  // Held by a launch that is under way.
  std::mutex running;
  const std::atomic<bool>& operations_stop() const { return operations_stop_; }
  const std::atomic<bool>& stop() const { return stop_; }
  std::uint64_t next_sequence() { return ++sequence_; }  // under `running`

  void add_pending();
  void remove_pending();
  void add_graph();
  void remove_graph();

  // Used by the calling program's threads, one at a time: no lock.
  std::map<int, Multiplier> multipliers;
  std::map<ncclWindow_t, std::shared_ptr<Window>> windows;
  std::map<void*, Registration> registrations;  // by handle
  cudaStream_t last_stream = nullptr;
  cudaEvent_t last_launch = nullptr;    // recorded in last_stream; null before the first launch
  cudaGraph_t last_graph = nullptr;     // into which a launch was captured
  cudaEvent_t last_captured = nullptr;  // recorded behind that
  std::uint32_t num_windows = 0;
  std::uint64_t num_children = 0;                           // that split and grow have made
  std::optional<Growth> growth;                             // that was offered and not taken yet
  std::map<std::uint64_t, std::uint32_t> consumed_signals;  // under `running`
  std::vector<std::weak_ptr<Communicator>> sharing;         // that share resources with this one
  bool is_ending = false;  // destroyed: that blocks, whatever the configuration says
  bool is_suspended = false;
  bool is_finalized = false;
  bool is_revoked = false;

  // The thread that is inside a call on this communicator, and which call: see Use in calls.hpp.
  std::atomic<std::thread::id> user{};
  std::atomic<const char*> user_function{nullptr};
  const pid_t pid = getpid();

 private:
  void set_busy(bool is_busy);
  void run_in_thread(const std::function<void()>& job);
  void await_no_pending();

  std::unique_ptr<Segment> segment_;
  std::unique_ptr<WindowService> window_service_;
  std::atomic<bool> operations_stop_{false};
  std::atomic<bool> stop_{false};
  std::uint64_t sequence_ = 0;
  std::uint64_t num_successors_ = 0;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  ncclResult_t error_ = ncclSuccess;
  bool is_busy_ = false;
  std::shared_ptr<Communicator> child_;  // while it is being made
  int num_pending_ = 0;
  int num_graphs_ = 0;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

FaultPlan& fault_plan();
// Carries out the fault that the plan has for a job at this point: throws, waits, or does nothing.
void suffer(const Fault& fault, const char* function, Communicator& communicator);

// What ncclGetLastError says in this process.
void set_last_error(const std::string& text);
const char* last_error();

}  // namespace emulation

#endif  // EMULATION_NCCL_COMMUNICATOR_HPP
