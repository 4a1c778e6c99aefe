// One rank's NCCL communicator: who may call it when, and how it ends.
//
// Communicators are non-blocking: a call of NCCL's that needs other ranks (init, split,
// finalize, the first use of a connection) returns ncclInProgress, and NCCL is asked again
// and again until it is done or time is up. The rules:
//
// - NCCL is called only under the device's lock, which is let go between two questions.
//   A communicator that is in progress is busy: its other callers wait, and so do the callers of
//   communicators that share its resources.
// - abort() waits for nobody: it sets is_aborting_, which callers see between two
//   questions, and leaves the rest to the reaper, which takes the communicator's handle away
//   under the lock. It waits for the lock for a second at most: a call that hangs inside NCCL
//   may have it, and only abort makes that return.
// - The first error stays: see first_error.hpp. A communicator that has one, or is in progress, is aborted,
//   never destroyed: destroying it would leave the thread inside a group for good.
// - Ending it is left to the reaper's threads, which are in no group of NCCL's. What ends it
//   is called without the lock: NCCL waits there for graphs that hold the communicator,
//   perhaps for ever, or, where communicators block, for other ranks, and other communicators
//   of the device go on meanwhile.
#ifndef FERRO_NCCL_COMMUNICATOR_HPP
#define FERRO_NCCL_COMMUNICATOR_HPP

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "abi/cudart_table.hpp"
#include "nccl/first_error.hpp"
#include "nccl/operation.hpp"
#include "nccl/patience.hpp"

namespace ferro::nccl {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(const Cudart& cuda, int device);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Makes a communicator of `world_size` ranks, which all pass the same `ids` in the same
  // order; one is enough, more than one need NCCL 2.23.
  static std::shared_ptr<Communicator> init(const Cudart& cuda, int device,
                                            const std::vector<ncclUniqueId>& ids, int world_size, int rank,
                                            ncclConfig_t config, Patience& patience);
  // As a new rank of a communicator that grows; `id` is from its unique_id().
  static std::shared_ptr<Communicator> join(const Cudart& cuda, int device, const ncclUniqueId& id,
                                            int world_size, int rank, ncclConfig_t config,
                                            Patience& patience);

  // Collective over this communicator. Null where `color` is NCCL_SPLIT_NOCOLOR.
  std::shared_ptr<Communicator> split(int color, int key, ncclConfig_t config, Patience& patience);
  // Collective over the ranks that are not `excluded`. `flags` as NCCL_SHRINK_*.
  std::shared_ptr<Communicator> shrink(std::vector<int> excluded, int flags, ncclConfig_t config,
                                       Patience& patience);
  // Collective over this communicator and the ranks that join. `id` on one rank, else null.
  std::shared_ptr<Communicator> grow(int world_size, const ncclUniqueId* id, ncclConfig_t config,
                                     Patience& patience);
  ncclUniqueId unique_id(Patience& patience);

  void launch(const Operation& operation, Patience& patience);

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return world_size_; }
  int device() const noexcept { return device_; }
  const Cudart& cuda() const noexcept { return cuda_; }

  void* register_buffer(void* data, std::size_t nbytes, Patience& patience);
  void deregister_buffer(void* handle, Patience& patience);
  ncclWindow_t register_window(void* data, std::size_t nbytes, int flags, Patience& patience);
  void deregister_window(ncclWindow_t window, Patience& patience);
  ncclRedOp_t create_premul_sum(void* scalar, ncclDataType_t dtype, ncclScalarResidence_t residence,
                                Patience& patience);
  void destroy_reduce_op(ncclRedOp_t reduce_op, Patience& patience);
  // For what nobody holds any more: the reaper gives it back, if the communicator still lives.
  // After that it calls `let_go(memory)` until that returns true or the process exits.
  void deregister_later(void* registration, bool (*let_go)(void*), void* memory) noexcept;
  // Calls `let_go` like that once the communicator has ended, for memory that it can reach until then.
  void let_go_once_ended(bool (*let_go)(void*), void* memory) noexcept;
  void destroy_reduce_op_later(ncclRedOp_t reduce_op) noexcept;
  void suspend(Patience& patience);
  void resume(Patience& patience);
  std::uint64_t memory(ncclCommMemStat_t statistic, Patience& patience);
  // What a single rank computes NCCL launches at once, on whatever device is current.
  bool needs_current_device() const noexcept { return world_size_ == 1; }
  // For whoever has the turn. Returns what NCCL returns.
  ncclResult_t issue_now(const Operation& operation);
  // The same on a stream, with the device current already if that is needed.
  ncclResult_t issue_on(const Operation& operation, cudaStream_t stream) {
    return issue(operation, stream, handle(), rank_, world_size_);
  }
  // What NCCL says of the communicator's state now: ncclSuccess, ncclInProgress or an error.
  ncclResult_t async_error(Patience& patience);

  // Waits until all that was launched is done on all ranks; only its end can follow.
  void finalize(Patience& patience);
  // Stops what is under way, here and on ranks that wait for it; only shrink, split and its
  // end can follow.
  void revoke(Patience& patience);
  // Ends it at once, from any thread; wait_ended() waits until NCCL is done with it. Ranks that
  // wait for this one are not told.
  void abort() noexcept;
  // Waits until the reaper has ended it.
  void wait_ended(Patience& patience) const {
    while (!is_ended()) patience.pause("ncclCommDestroy");
  }
  bool is_aborted() const noexcept { return is_aborting_.load(std::memory_order_acquire); }
  bool is_ended() const noexcept { return is_ended_.load(std::memory_order_acquire); }
  // Whether this rank has stopped what was under way, by an abort, a revocation or a shrink that aborts:
  // nobody can tell any more which calls were done before.
  bool is_stopped() const noexcept { return is_stopped_.load(std::memory_order_acquire) || is_aborted(); }
  // Whether it was merely closed, and neither failed nor was stopped: what it has done is right.
  bool is_closed_in_order() const noexcept {
    return is_closing_.load(std::memory_order_acquire) && !has_failed() && !is_in_doubt() && !is_stopped();
  }

  // Names the rank whose end is behind an error of NCCL's. Null for nobody.
  void hear(FirstError::Witness witness) { first_error_.hear(std::move(witness)); }
  // Keeps `error` as the reason for which all later calls fail, unless there is one.
  void fail(const Error& error) noexcept { first_error_.keep(error); }
  // As fail(), but false while the witness is waited for: try again soon. No lock may be held.
  bool try_fail(const Error& error) noexcept;
  // Throws what keeps it from being called: its first error, its end, or that it belongs to
  // another process.
  void check_open() const;
  // For whoever has the turn: throws while it is suspended, and once it was finalized. NCCL does not look:
  // its kernels would use memory that is gone, which ends all work on the device.
  void check_in_service(const char* function) const;
  bool has_failed() const noexcept { return first_error_.exists(); }
  // Whether NCCL has told of an error, and the witness is waited for.
  bool is_in_doubt() const noexcept { return first_error_.is_in_doubt(); }
  // Whether some call is waiting for NCCL to finish what it began.
  bool is_busy() const noexcept { return family_->is_busy.load(std::memory_order_acquire); }

  // Looks for an error that no call has met. True if there is a new one, which may have to be looked for
  // again while it is in doubt. Who is about to say that all went well must be patient: another thread that
  // is inside NCCL may have looked too early for it. The watchdog looks again soon.
  bool discover_error(bool is_patient) noexcept;

  // For the reaper: calls are refused from here on.
  void begin_end() noexcept { is_closing_.store(true, std::memory_order_release); }
  // For the reaper that has stopped: the system ends it, with the process. Nobody can wait for that.
  void leave_to_system() noexcept { is_ended_.store(true, std::memory_order_release); }
  // For a single thread of the reaper's: goes one step towards the end; true once it is reached. For
  // a healthy communicator that is finalize, until `deadline`, and destroy; otherwise abort.
  bool advance_end(Patience::Clock::time_point deadline) noexcept;

 private:
  friend class Turn;
  using Lock = std::unique_lock<std::mutex>;

  // Communicators that share NCCL's resources, which the options split_share and shrink_share ask
  // for: NCCL takes calls on only one of them at a time, and what stops the work of one stops that of
  // all: an abort, a revocation, a shrink that aborts.
  struct Family {
    std::atomic<bool> is_busy{false};  // set under the device's lock, reset by whoever set it
    std::mutex lock;
    std::vector<std::weak_ptr<Communicator>> members;  // under lock; empty while there is only one
  };

  // For the reaper's thread: takes the handle away, and lets NCCL abort it.
  void abort_now() noexcept;
  void check_not_finalized(const char* function) const;
  // Waits for a communicator in the making and asks it who it is; aborts it if that fails.
  void complete(ncclResult_t result, const char* function, Patience& patience);
  void adopt_newborn() noexcept;
  template <typename Call>
  static std::shared_ptr<Communicator> make(const char* function, const Cudart& cuda, int device,
                                            ncclConfig_t& config, Patience& patience, Call call);
  template <typename Make>
  std::shared_ptr<Communicator> make_child(const char* function, ncclConfig_t& config, bool is_sharing,
                                           Patience& patience, Make make);
  // Notes what the options say of children, and replaces their texts by copies.
  void keep_options(ncclConfig_t& config);
  void adopt_into_family(const std::shared_ptr<Communicator>& child);
  // For what stops the work of all: NCCL reports it to none of them. Returns the others, which fail from
  // here on. Call it first, so that no result is taken for good.
  std::vector<std::shared_ptr<Communicator>> stop_family() noexcept;
  ncclComm_t handle() const noexcept { return handle_.load(std::memory_order_acquire); }
  // True once nothing is left to wait for; is_finalized_ says how it went.
  bool finalize_quietly(ncclComm_t handle, Patience::Clock::time_point deadline) noexcept;

  const Cudart& cuda_;
  const int device_;
  // NCCL keeps their addresses. Unchanged once it is made.
  std::vector<std::unique_ptr<const std::string>> texts_;
  bool shares_with_split_ = false;  // as are these
  bool shares_with_shrunk_ = false;
  std::shared_ptr<Family> family_ = std::make_shared<Family>();
  const int num_forks_;
  std::mutex& lock_;  // the device's
  int rank_ = -1;
  int world_size_ = 0;

  // Written under lock_, but abort_now() takes it away without that if a call hangs.
  std::atomic<ncclComm_t> handle_{nullptr};
  // Where NCCL's own thread writes the handle of a communicator in the making.
  ncclComm_t newborn_ = nullptr;
  // Children that were being made when a call of ours gave up: they end with us. Under lock_.
  std::vector<std::shared_ptr<Communicator>> unfinished_;

  std::atomic<bool> is_stopped_{false};
  std::atomic<bool> is_aborting_{false};
  std::atomic<bool> is_closing_{false};
  std::atomic<bool> is_ended_{false};
  bool is_revoked_ = false;  // under lock_ or is_busy, as the next three
  bool is_suspended_ = false;
  bool is_finalizing_ = false;
  bool is_finalized_ = false;

  FirstError first_error_;
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_COMMUNICATOR_HPP
