// The calls of one communicator, in order with the callers' streams and with each other.
//
// A call whose result the caller's stream is to wait for runs on that stream: nothing has to be put
// in order. Any other, which leaves that stream free, runs on the lane's own. None of its steps
// blocks the host:
//   1. an event is recorded on the caller's stream, and the lane's stream waits for it: what the
//      caller queued before is done before NCCL reads;
//   2. NCCL launches;
//   3. an event is recorded there, for which the caller's stream waits at hand_back(): what the
//      caller queues later finds the result.
// The same is done with the second stream of a call on arrays of two libraries. In a CUDA graph
// capture records and waits become edges of the graph.
//
// Calls end in the order in which they began: one on another stream than the last waits for that
// one's event. The events also tell when the arrays of a call are free, and whether it is overdue.
#ifndef FERRO_NCCL_LANE_HPP
#define FERRO_NCCL_LANE_HPP

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "abi/alarm.hpp"
#include "nccl/attendance.hpp"
#include "nccl/communicator.hpp"
#include "nccl/span.hpp"

namespace ferro::nccl {

class Turn;

class Lane : public std::enable_shared_from_this<Lane> {
 public:
  // All calls run on `stream`, which its owner keeps alive and destroys, if it is not null.
  Lane(std::shared_ptr<Communicator> communicator, cudaStream_t stream);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  static std::shared_ptr<Lane> open(std::shared_ptr<Communicator> communicator, cudaStream_t stream);

  // Launches `operations`, as one group if there are several. Returns the call's ticket: they
  // count from 1; 0 for a call that went into a graph. With `is_async` the callers' streams
  // do not wait until hand_back(). A call not done after `timeout_s` ends the communicator.
  std::uint64_t launch(Span<Operation> operations, Span<cudaStream_t> callers, bool is_async,
                       double timeout_s, Patience& patience);
  // Makes `callers` wait for a call that is still under way.
  void hand_back(std::uint64_t ticket, Span<cudaStream_t> callers);
  // Blocks until the call is done; throws what ended the communicator meanwhile.
  void synchronize(std::uint64_t ticket, Patience& patience);
  bool is_done(std::uint64_t ticket);
  // The number of calls that are done: those with tickets up to it.
  std::uint64_t num_done();
  // Finds out about some of them, with one question to CUDA.
  void look_for_done();
  // The number as it was last seen by anybody, which costs nothing.
  std::uint64_t num_seen_done() const noexcept { return num_done_.load(std::memory_order_acquire); }
  std::uint64_t num_launched() const noexcept { return num_launched_.load(std::memory_order_acquire); }

  cudaStream_t stream() const noexcept { return stream_; }
  // Whether what the lane's stream is given now goes into a graph, for which nobody can wait.
  bool is_captured() const;
  const std::shared_ptr<Communicator>& communicator() const noexcept { return communicator_; }

  // Ends the communicator when `alarm` tells that a rank is gone.
  void heed(Alarm alarm);
  // From the first call on, writes down what this rank calls, and reads who has not come.
  void attend(int fd, const std::vector<int>& members);
  // Tells those that share the attendance that no call will follow. One that `is_aborting` says so before it
  // does, as NCCL may tell the others of that.
  void leave(bool is_aborting) noexcept;

  // For the watchdog: ends the communicator if a rank is gone or the oldest call is overdue.
  // Asks CUDA nothing.
  void look_after() noexcept;
  // For the watchdog's other thread: finds out which calls are done.
  void observe() noexcept;

 private:
  struct Flight {
    cudaEvent_t done;
    Op op;
    double timeout_s;
    double begin_s;
    Attendance::Entry entry;
  };

  // While it lives, the watchdog sees a call for which NCCL connects the ranks: the first of its kind, which
  // is not launched before they are all there.
  struct Connecting {
    Connecting(Lane& lane, Op op, const Attendance::Entry& entry);
    ~Connecting();
    Connecting(const Connecting&) = delete;
    Connecting& operator=(const Connecting&) = delete;

    Lane& lane;
    const Op op;
    const Attendance::Entry& entry;
  };

  static void destroy(Lane* lane) noexcept;
  // Throws what has ended the communicator, unless the call was done before an orderly end.
  void check_good(std::uint64_t ticket) const;
  // Throws what keeps calls from being made or done.
  void check_usable() const;
  // What the host's side, and then the attendance, know of an end of another rank: ErrorKind::none if
  // nothing.
  Error culprit() noexcept;
  Error culprit_of_loss() const;       // under lock_, as the next two
  Error culprit_of_desertion() const;  // from any call
  Error desertion(Op op, const Attendance::Entry& entry) const;
  void bear_witness();
  // What the watchdog looks for, in this order: an error for which the communicator has to end, of
  // ErrorKind::none if there is none.
  Error lost_rank() noexcept;
  Error overdue_call() noexcept;
  Error deserted_call() noexcept;  // that a rank has left without making
  Error forsaken_end() noexcept;   // which a rank that has left takes no part in
  // Adds the ranks that have not made the oldest call, for whom all other calls wait, too. Under lock_.
  void tell_awaited(Error& error) const;
  cudaStream_t place_of(Span<cudaStream_t> callers, bool is_async) const noexcept;
  void order_after(cudaStream_t stream, Span<cudaStream_t> callers);
  void order_after_last(cudaStream_t stream);
  void order_behind(cudaStream_t stream, cudaEvent_t done, Span<cudaStream_t> callers);
  bool is_capturing(Span<cudaStream_t> callers) const;
  Attendance::Entry issue_attended(Span<Operation> operations, cudaStream_t stream, bool is_captured,
                                   Turn& turn, Patience& patience);
  ncclResult_t issue_all(Span<Operation> operations, cudaStream_t stream);
  std::uint64_t take_off(Flight flight, cudaStream_t stream);
  void give_to_graph(cudaEvent_t done);
  cudaEvent_t take_event();  // under the device's lock
  void prepare_event();      // under lock_ and the device's
  void retire();             // under retire_lock_, as the next
  void remove(std::size_t count);
  std::size_t num_flights();
  cudaEvent_t event_of(std::size_t flight);

  const std::shared_ptr<Communicator> communicator_;
  const Cudart& cuda_;
  const bool owns_stream_;
  const int num_forks_;
  cudaStream_t stream_;
  cudaEvent_t arrival_ = nullptr;     // used under the device's lock, as launch is
  cudaEvent_t next_event_ = nullptr;  // the same: what the next call records, if it is there already
  // The same: of the last call. Of a stream that is destroyed while it works, the next one may have the
  // address, and wait for it no more; where ranks are several, NCCL itself lets their calls wait for each
  // other.
  cudaStream_t last_stream_;

  // Held by whoever asks CUDA which calls are done; taken before lock_. Flights are removed under both.
  std::mutex retire_lock_;
  // Never held during a call of CUDA's, which blocks the host while a stream is full.
  mutable std::mutex lock_;
  Alarm alarm_;  // under lock_
  // Set once, before the first call; then used under the device's lock, and read under lock_.
  std::unique_ptr<Attendance> attendance_;
  std::atomic<Op> last_op_{};
  std::atomic<bool> has_left_{false};
  double deserted_since_s_ = 0;  // the watchdog's
  static constexpr std::size_t kMinFlights = 32;

  const Connecting* connecting_ = nullptr;      // under lock_
  std::deque<Flight> flights_;                  // under lock_
  std::size_t retire_at_ = kMinFlights;         // under lock_: how many flights may gather
  std::vector<cudaEvent_t> spare_events_;       // under lock_
  int num_borrowed_ = 0;                        // under lock_: events that hand_back() uses
  double asked_s_ = 0;                          // under lock_: when the last answer of CUDA's was asked for
  std::atomic<bool> is_device_lost_{false};     // CUDA has answered with an error
  std::atomic<std::uint64_t> num_done_{0};      // written under lock_
  std::atomic<std::uint64_t> num_launched_{0};  // written under lock_
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_LANE_HPP
