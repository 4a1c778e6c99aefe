// One rank's side of a group: the engine's public face.
#ifndef FERRO_COMMUNICATOR_HPP
#define FERRO_COMMUNICATOR_HPP

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/copy_choice.hpp"
#include "ferro/gate.hpp"
#include "ferro/heap.hpp"
#include "ferro/messenger.hpp"
#include "ferro/task.hpp"
#include "ferro/task_queue.hpp"
#include "ferro/transport.hpp"

namespace ferro {

// How the ranks of a group reach each other. Connected, authenticated and
// verified by whoever makes it; the engine parses nothing that a stranger sent.
struct Wiring {
  int rank = 0;
  int world_size = 1;
  std::vector<int> local_ranks;         // of this host, ascending, this rank included
  int segment_fd = -1;                  // shared by local_ranks, if there are several; stays the caller's
  std::vector<int> collective_sockets;  // by rank, -1 for local ones; owned by the Communicator,
  std::vector<int> message_sockets;     // even if its construction throws
  std::vector<std::vector<int>> hosts;  // all ranks, by host
  int num_colocated = 1;  // ranks of this machine, this one included, whether they share memory or not
  int num_cores = 1;      // that those ranks may use together
  PeerReads peer_reads = PeerReads::automatic;
};

class Communicator {
 public:
  static std::shared_ptr<Communicator> connect(const Wiring& wiring);
  // All ranks of a group as threads of this process.
  static std::vector<std::shared_ptr<Communicator>> create_group(int world_size, int num_cores,
                                                                 PeerReads peer_reads = PeerReads::automatic);

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // What the members' ranks are in the group that this one was made from, by which errors name it. Before the
  // first call.
  void set_global_ranks(std::vector<int> ranks) {
    global_ranks_ = std::make_shared<const std::vector<int>>(std::move(ranks));
  }

  // Runs a call to its end. On the caller's thread, unless earlier calls still
  // wait for the progress thread. Errors have op, sequence, rank and group filled in.
  // If that thread cannot be started, this and submit() throw Error{io}: nothing of the call
  // has been sent, and the group goes on.
  void run(Call& call, const Collective& collective);
  void exchange(Call& call, Op op, const std::vector<PointToPoint>& messages);

  // The same without waiting. Collectives run in the order in which they were
  // submitted; so do messages to or from one peer, independently of collectives.
  std::shared_ptr<Task> submit(const Collective& collective, double timeout_s);
  std::shared_ptr<Task> submit(Op op, const std::vector<PointToPoint>& messages, double timeout_s);
  // Blocks until the task is done. Throws Error{under_way} if the caller's time runs out first.
  void wait(Call& call, Task& task);
  // Whether it is done. Asked in a loop, sees to it that it gets done.
  bool is_done(Task& task);

  // Leaves the group. Calls under way on this rank raise Error{closed}. Idempotent. True once no
  // array is in use any more, false while another thread is still closing. What the group holds of
  // the system is given back then, or by the last thread that is still inside a call; arrays in
  // symmetric memory keep that.
  bool close() noexcept;
  // The part of close() that is safe in a signal handler which has interrupted a call of
  // this group: ends the calls without waiting for them. close() must be called after them.
  void begin_close() noexcept;
  bool is_closed() const { return is_closed_.load(std::memory_order_acquire); }
  // Once this rank has left: the reason for which the group had ended before, if it had.
  AbortReason aborted() const noexcept;
  bool has_ended() const noexcept { return aborted().is_set(); }

  // For survivors that form a successor of this group: what this rank knows of the others.
  // lost_ranks(), ascending, are certain to be lost; see Transport for the other two. Throw
  // Error{closed} once this rank has left.
  std::vector<int> lost_ranks();
  std::uint32_t succession() const { return open_transport()->succession(); }
  bool advance_succession(std::uint32_t from, std::uint32_t to) {
    return open_transport()->advance_succession(from, to);
  }
  // Ends the group for the ranks that are still in it, since this one goes on in a successor.
  // May be called from any thread, even while another is inside a call.
  void supersede() noexcept {
    is_superseded_.store(true, std::memory_order_relaxed);  // for this thread: it closes the group next
    end(ErrorCode::superseded, rank_);
  }
  // The same, where this rank was interrupted between calls that belong together.
  void interrupt() noexcept { end(ErrorCode::interrupted, rank_); }

  // Symmetric memory of this rank; null where the group shares none, or once this rank has left.
  std::shared_ptr<Heap> heap() const { return share(parts_.heap); }

 private:
  // What the group holds of the system.
  struct Parts {
    std::shared_ptr<Transport> transport;
    std::shared_ptr<Messenger> messenger;  // shares in the transport
    std::shared_ptr<Heap> heap;
  };
  Communicator(int rank, int world_size, Parts parts);

  void check_open() const;
  std::shared_ptr<Transport> open_transport() const;
  // A share in one of parts_; null once close() has taken them away.
  template <class Part>
  std::shared_ptr<Part> share(const std::shared_ptr<Part>& part) const {
    const std::lock_guard<std::mutex> lock(parts_mutex_);
    return part;
  }
  // The number of a call that begins now. Not fetch_add: only the holder of the gate writes it, and a locked
  // instruction costs more.
  static std::uint64_t next(std::atomic<std::uint64_t>& number) noexcept {
    const std::uint64_t current = number.load(std::memory_order_relaxed);
    number.store(current + 1, std::memory_order_relaxed);
    return current;
  }

  // ---- Errors (communicator.cpp) ----
  // Notes what failed and, if the group cannot go on, tells the others.
  Error failure(Error error, Op op, std::uint64_t sequence, const Call& call) noexcept;
  void end_for(Error& error, const Call& call) noexcept;
  void settle_timeout(Transport& transport, Error& error) noexcept;
  void trace_and_testify(const Call& call, Error& error) noexcept;
  void end(ErrorCode code, int culprit, std::uint32_t sequence = 0) noexcept;
  void notify() noexcept;

  // ---- Calls on the caller's thread (communicator.cpp) ----
  void note_caller() noexcept;
  void run_now(Call& call, const Collective& collective, std::uint64_t sequence);
  void run_now(Call& call, Op op, Batch& batch);
  Gate::Pass enter(Gate& gate, Call& call, Op op, const std::atomic<std::uint64_t>& number);
  void check_outside(Op op, std::uint64_t sequence, const Call& call);
  void await(Call& call, const std::shared_ptr<Task>& queued);
  bool await_done(Call& call, Task& task);
  Error reason_to_give_up(Call& call, Task& task);

  // ---- Small calls that have begun (communicator_begun.cpp) ----
  struct Ended {
    std::shared_ptr<Task> task;  // null if there was none
    std::optional<Error> error;
  };
  void advance(Call* call, Task& task);
  bool begin_at_once(const std::shared_ptr<Task>& task);
  void advance_collective(Call* call);
  void hand_over_begun();
  Ended complete_begun() noexcept;
  void retire(Ended ended) noexcept;
  bool post_at_once(const std::shared_ptr<Task>& task);
  void advance_messages(Call* call, Task& task);
  bool enter_messages(Call& call);
  std::shared_ptr<Messenger> hand_over(Tasks::iterator posted);
  void complete_posted() noexcept;
  static Tasks take_done(Tasks& tasks) noexcept;
  void retire(const Tasks& done) noexcept;

  // ---- Calls on the progress threads (communicator_progress.cpp) ----
  void enqueue(const std::shared_ptr<Task>& task);
  std::vector<int> awaited_by(const Task& task);
  void complete_handed_over() noexcept;
  void run_collectives() noexcept;
  void run_messages() noexcept;
  Tasks move_messages(Tasks& under_way) noexcept;
  void start_submitted(Tasks& under_way) noexcept;
  void start(Task& task);
  void check_messages(const Tasks& under_way) const;
  void await_messages(const Tasks& under_way, int idle, std::uint32_t heard);
  Error abandoned(const Task& task) noexcept;
  std::optional<Error> outcome(const Task& task) noexcept;

  const int rank_;
  const int world_size_;
  std::shared_ptr<const std::vector<int>> global_ranks_;  // null if these ranks are global themselves
  // close() takes them away, with both gates and parts_mutex_ held. A thread that has passed a gate and
  // found the group open uses them as they are. All others take a share(): the last to drop one closes
  // sockets and memory.
  Parts parts_;
  mutable std::mutex parts_mutex_;
  AbortReason last_reason_;  // what aborted() returns once they are gone; written before that

  Gate collective_gate_;                           // held by whoever runs a collective
  const std::shared_ptr<Gate> message_gate_;       // the messenger's, for those that outlive it
  std::atomic<std::uint64_t> num_collectives_{0};  // written under collective_gate_
  std::atomic<std::uint64_t> num_exchanges_{0};    // written under message_gate_
  // A small collective whose header is out, and the rest of which needs nothing but those of the peers. No
  // peer waits for that, so it is left to whoever asks for the task, or makes the next call; only if headers
  // are late, to the progress thread. Guarded by collective_gate_; pending in collective_queue_, but not in
  // it.
  std::shared_ptr<Task> begun_;
  TaskQueue collective_queue_;
  // The same for messages, of which only sends are left that their receivers can fetch, and receives that
  // hold up no sender; guarded by message_gate_.
  Tasks posted_;
  TaskQueue message_queue_;
  std::atomic<pthread_t> caller_{};  // the first thread that made a call
  std::atomic<bool> has_several_callers_{false};
  std::mutex close_mutex_;              // held until the peers know that this rank leaves
  std::atomic<bool> is_closed_{false};  // no call may start
  std::atomic<bool> is_superseded_{false};
  std::atomic<bool> has_left_{false};  // close() has begun to wait for calls under way
};

}  // namespace ferro

#endif  // FERRO_COMMUNICATOR_HPP
