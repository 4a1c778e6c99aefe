// Streams: each a thread that carries out what it is given, in order, some time later.
#ifndef EMULATION_CUDART_STREAM_HPP
#define EMULATION_CUDART_STREAM_HPP

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "emulation/cudart/cuda_abi.hpp"

namespace emulation {

// A point in a stream's work that is reached once.
class Milestone {
 public:
  void reach();
  void wait();
  bool is_reached();
  std::chrono::steady_clock::time_point time();  // of a milestone that is reached

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;  // under mutex_, as is time_
  std::chrono::steady_clock::time_point time_;
};
using MilestonePtr = std::shared_ptr<Milestone>;

// The thread that asked for an operation, and how much it had computed by then.
//
// A delay gives the program time to make its mistake: to free what is still in use, or to
// read what is not there yet. On a busy machine the kernel may give that time to another
// process; so an operation also waits while its asker is runnable but does not get to run.
struct Asker {
  int thread = 0;
  clockid_t clock = 0;
  long long cpu_ns = 0;

  static Asker here();
  bool has_had_time(long long needed_ns) const;
};
// On whose behalf this thread asks from now on: a library's thread acts for the one that called it.
void ask_for(const Asker& asker);

// One operation of a stream.
struct Operation {
  const char* name = "nothing";
  std::function<void()> run = {};
  std::vector<MilestonePtr> after = {};  // of other streams, to be waited for first
  bool is_delayed = true;
};

struct Capture;  // graph.hpp

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // `handle` is what the program knows the stream by.
  static std::shared_ptr<Stream> start(cudaStream_t handle, int device, unsigned flags);

  // Appends to the work; the milestone is reached when the operation is done.
  MilestonePtr submit(Operation operation);
  // Reached when all that was submitted so far is done; null if there was nothing.
  MilestonePtr latest();
  // Lets the thread end once it has done all that was submitted.
  void close();

  const cudaStream_t handle;
  const int device;
  const unsigned flags;
  bool synchronizes_with_legacy() const { return (flags & cudaStreamNonBlocking) == 0; }

  // While the stream is captured, its operations become nodes of a graph, each after
  // those in `tail`. Both guarded by the runtime's lock.
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> tail;

 private:
  Stream(cudaStream_t handle, int device, unsigned flags) : handle(handle), device(device), flags(flags) {}

  struct Item {
    Operation operation;
    Asker asker;
    MilestonePtr done;
  };
  void work();
  void carry_out(const Item& item) const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;  // under mutex_, as are the next two
  MilestonePtr latest_;
  bool is_closed_ = false;
};
using StreamPtr = std::shared_ptr<Stream>;

// What this thread, if it is a stream's, is doing: for the report of a fault.
struct Activity {
  const char* operation = nullptr;
  cudaStream_t stream = nullptr;
  int device = 0;
};
Activity current_activity();
void set_activity(const char* operation);

// Makes every operation late by so many microseconds.
void set_delay_us(int microseconds);

}  // namespace emulation

#endif  // EMULATION_CUDART_STREAM_HPP
