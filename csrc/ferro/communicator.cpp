// Opening and closing, errors, and calls on the caller's thread; those on threads of the rank's own are in
// communicator_progress.cpp.
#include "ferro/communicator.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "ferro/clock.hpp"
#include "ferro/shm_cost.hpp"

namespace ferro {
namespace {

// How much longer a call that had to queue waits for the message thread to say which rank did
// not come: by itself it could only say that the time is up.
constexpr double kGraceSeconds = 0.5;

// How long a rank that closes waits for a thread that is inside a gate only to look.
constexpr std::chrono::milliseconds kLookTime{10};

// Enters the gate unless a call is under way. A thread that looks after what another has done meanwhile, or
// after work that has begun, is no reason to end the group, and out again at once.
bool enter_if_idle(Gate& gate) noexcept {
  if (gate.try_enter()) return true;
  const Clock::time_point deadline = Clock::now() + kLookTime;
  while (!gate.is_mine() && Clock::now() < deadline) {
    sched_yield();
    if (gate.try_enter()) return true;
  }
  return false;
}

bool is_fatal(ErrorCode code) {
  return code != ErrorCode::mismatch && code != ErrorCode::size_mismatch && code != ErrorCode::unsupported;
}

}  // namespace

Communicator::Communicator(int rank, int world_size, Parts parts)
    : rank_(rank),
      world_size_(world_size),
      parts_(std::move(parts)),
      message_gate_(parts_.messenger->gate()) {}

Communicator::~Communicator() { close(); }

void Communicator::check_open() const {
  if (is_closed()) throw Error(ErrorCode::closed);
}

std::shared_ptr<Transport> Communicator::open_transport() const {
  std::shared_ptr<Transport> transport = share(parts_.transport);
  if (transport == nullptr) throw Error(ErrorCode::closed);
  return transport;
}

AbortReason Communicator::aborted() const noexcept {
  const std::shared_ptr<Transport> transport = share(parts_.transport);
  return transport != nullptr ? transport->aborted() : last_reason_;
}

Error Communicator::failure(Error error, Op op, std::uint64_t sequence, const Call& call) noexcept {
  const bool is_own_fault = error.code == ErrorCode::interrupted || error.code == ErrorCode::out_of_memory;
  if (is_own_fault && error.peer < 0) error.peer = rank_;
  if (is_closed()) error.code = ErrorCode::closed;
  error.op = op;
  error.sequence = sequence;
  error.rank = rank_;
  error.global_ranks = global_ranks_;
  error.elapsed_s = call.elapsed_s();
  const std::shared_ptr<Transport> transport = share(parts_.transport);
  if (transport == nullptr) return error;
  const AbortReason known = transport->aborted();
  if (known.is_set())
    transport->abort(known);  // whoever has heard of it says so: others may be listening
  else if (is_fatal(error.code))
    end_for(error, call);
  else
    return error;
  if (error.code == ErrorCode::timeout) settle_timeout(*transport, error);
  const AbortReason winner = transport->aborted();  // another rank may have been first after all
  const bool is_of_another_call = error.code == ErrorCode::timeout && !call.is_expired();
  if (winner.reporter != rank_ || is_of_another_call) error.reporter = winner.reporter;
  return error;
}

// Ends the group for an error of this rank.
void Communicator::end_for(Error& error, const Call& call) noexcept {
  if (error.code == ErrorCode::closed) return end(ErrorCode::channel_closed, rank_);
  trace_and_testify(call, error);
  end(error.code, error.peer, static_cast<std::uint32_t>(error.sequence));
}

// All ranks report the same end. Where the rank that gave up had been waiting for nobody, what this
// one saw counts, provided that it saw that same end.
void Communicator::settle_timeout(Transport& transport, Error& error) noexcept {
  RankSet missing;
  try {
    missing = transport.find_missing();
  } catch (const std::bad_alloc&) {
    // Then only the first rank that was accused is named.
  }
  const AbortReason reason = transport.aborted();
  if (error.awaited.empty()) error.awaited = error.missing;
  const std::vector<int>& seen = error.missing;
  const bool is_same =
      reason.code == ErrorCode::timeout &&
      (reason.culprit < 0 || std::find(seen.begin(), seen.end(), reason.culprit) != seen.end());
  if (reason.reporter != rank_ && !is_same) {
    error.code = reason.code;
    error.peer = reason.culprit;
    error.detail.clear();
    error.missing.clear();
    error.is_deadlock = false;
  }
  if (error.code != ErrorCode::timeout || missing.none()) return;
  name_missing(error, missing);
}

// For a call that is being given up: finds out who is missing, and lets the others know. Unless its time ran
// out, nobody is.
void Communicator::trace_and_testify(const Call& call, Error& error) noexcept {
  if (error.code != ErrorCode::timeout) return;
  const auto transport = share(parts_.transport);
  if (transport == nullptr) return;
  try {
    transport->trace(call, error);
  } catch (const std::bad_alloc&) {
    // Then those are named for which it waited itself.
  }
  transport->testify(call, error);
}

// Ends the group on every rank.
void Communicator::end(ErrorCode code, int culprit, std::uint32_t sequence) noexcept {
  if (const auto transport = share(parts_.transport)) transport->abort({code, culprit, rank_, sequence});
  notify();
}

// Wakes the threads of this rank that sleep until messages move.
void Communicator::notify() noexcept {
  if (const auto messenger = share(parts_.messenger)) messenger->notify();
}

std::vector<int> Communicator::lost_ranks() {
  const std::shared_ptr<Transport> transport = open_transport();
  RankSet ranks;
  transport->add_lost(ranks);
  const AbortReason reason = transport->aborted();
  const bool has_left = reason.code == ErrorCode::peer_lost || reason.code == ErrorCode::channel_closed;
  if (has_left && reason.culprit >= 0) ranks.set(reason.culprit);
  if (message_gate_->try_enter()) {  // else at the next look: calls of a group that has ended leave soon
    const Gate::Pass pass(*message_gate_, std::adopt_lock);
    if (!is_closed()) parts_.messenger->add_lost(ranks);
  }
  ranks.reset(rank_);
  return ranks_of(ranks);
}

void Communicator::begin_close() noexcept {
  // Another thread that closes goes on once the peers know: it would stop the queues.
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (is_closed_.exchange(true, std::memory_order_acq_rel)) return;
  const std::shared_ptr<Messenger> messenger = share(parts_.messenger);
  const bool has_entered_collectives = enter_if_idle(collective_gate_);
  const bool has_entered_messages = enter_if_idle(*message_gate_);
  if (has_entered_messages && !posted_.empty()) complete_posted();
  // Calls that sleep have left the gate, but what they posted is still there.
  const bool are_messages_idle = has_entered_messages && messenger->is_idle();
  // From here on every call under way fails soon, and leaves its gate.
  if (!has_entered_collectives || !are_messages_idle) end(ErrorCode::channel_closed, rank_);
  if (has_entered_collectives && begun_ != nullptr && parts_.transport->have_all_begun())
    retire(complete_begun());
  // Not before: the queues' threads then give arrays back that a peer reads until it is told of the end. Work
  // that has not begun counts, too: whether it has is a matter of chance, and must make no difference to
  // the peers.
  const bool had_collectives = collective_queue_.stop(), had_messages = message_queue_.stop();
  if (had_collectives || had_messages) end(ErrorCode::channel_closed, rank_);
  if (has_entered_collectives) collective_gate_.leave();
  if (has_entered_messages) message_gate_->leave();
}

bool Communicator::close() noexcept {
  begin_close();
  if (has_left_.exchange(true, std::memory_order_acq_rel)) return share(parts_.transport) == nullptr;
  Call unhurried(kUnlimited);
  collective_queue_.join();
  message_queue_.join();
  const Gate::Pass collective_pass(collective_gate_, unhurried);
  const Gate::Pass message_pass(*message_gate_, unhurried);
  if (begun_ != nullptr) {
    Error error = abandoned(*begun_);
    retire(Ended{std::exchange(begun_, nullptr), std::move(error)});
  }
  last_reason_ = parts_.transport->aborted();
  Parts parts;
  {
    const std::lock_guard<std::mutex> lock(parts_mutex_);
    std::swap(parts, parts_);
  }
  // Calls that sleep outside the gate touch no array from here on.
  parts.messenger->end(Error(ErrorCode::closed));
  retire(take_done(posted_));
  // In this order: a peer whose message never comes asks the transport for the reason.
  parts.transport->close();
  parts.messenger->close(is_superseded_.load(std::memory_order_relaxed));
  return true;
}

// ---- Calls on the caller's thread ----------------------------------------------

// What a rank has several threads for is not known here: while one waits, another may be at work on what the
// others wait for.
void Communicator::note_caller() noexcept {
  pthread_t known = caller_.load(std::memory_order_relaxed);
  if (pthread_equal(known, pthread_self()) != 0 || has_several_callers_.load(std::memory_order_relaxed))
    return;
  known = pthread_t{};
  if (caller_.compare_exchange_strong(known, pthread_self(), std::memory_order_relaxed)) return;
  if (const auto transport = share(parts_.transport)) transport->note_several_callers();
  has_several_callers_.store(true, std::memory_order_relaxed);
}

void Communicator::run(Call& call, const Collective& collective) {
  check_open();
  note_caller();
  if (collective_queue_.num_pending() != 0) advance_collective(&call);
  if (collective_queue_.num_pending() == 0) {
    const Gate::Pass pass = enter(collective_gate_, call, collective.op, num_collectives_);
    check_open();
    if (begun_ == nullptr) return run_now(call, collective, next(num_collectives_));
  }
  check_outside(collective.op, kNoSequence, call);
  await(call, std::make_shared<Task>(collective, world_size_, call.timeout_s()));
}

void Communicator::run_now(Call& call, const Collective& collective, std::uint64_t sequence) {
  try {
    parts_.transport->run(call, collective);
  } catch (const std::exception&) {
    throw failure(current_error(), collective.op, sequence, call);
  }
}

void Communicator::exchange(Call& call, Op op, const std::vector<PointToPoint>& messages) {
  check_open();
  note_caller();
  Batch batch(messages);
  if (Messenger::nbytes_of(batch) > shm_cost::kBriefNbytes) call.begin_blocking();
  bool must_queue;
  Tasks done;
  {
    const Gate::Pass pass = enter(*message_gate_, call, op, num_exchanges_);
    check_open();
    must_queue = message_queue_.num_waiting() != 0;
    if (!must_queue) {
      run_now(call, op, batch);
      done = take_done(posted_);  // what has come with it: perhaps nobody asks for that
    }
  }
  retire(done);
  if (!must_queue) return;
  // Goes behind what this thread may have submitted earlier, and what has not been posted yet.
  const auto task = std::make_shared<Task>(op, messages, call.timeout_s());
  call.extend(kGraceSeconds);
  await(call, task);
}

void Communicator::run_now(Call& call, Op op, Batch& batch) {
  batch.set_sends_patient();
  parts_.messenger->post(batch);
  const std::uint64_t sequence = next(num_exchanges_);
  try {
    parts_.messenger->run(call, batch);
  } catch (const std::exception&) {
    throw failure(current_error(), op, sequence, call);
  }
}

// A call that could not even start ends the group like one that failed: the peers make it, too.
Gate::Pass Communicator::enter(Gate& gate, Call& call, Op op, const std::atomic<std::uint64_t>& number) {
  try {
    return Gate::Pass(gate, call);
  } catch (const Error& error) {
    throw failure(error, op, number.load(std::memory_order_relaxed), call);
  }
}

// For calls that will wait for the progress thread, which can enter only once this thread has left.
void Communicator::check_outside(Op op, std::uint64_t sequence, const Call& call) {
  if (collective_gate_.is_mine()) throw failure(Gate::reentered(), op, sequence, call);
}

// Runs a call that has to queue. It must not return before the engine has let go of its arrays. The progress
// thread does all of it: nothing that this thread began would be attended to while it sleeps.
void Communicator::await(Call& call, const std::shared_ptr<Task>& queued) {
  enqueue(queued);
  Task& task = *queued;
  Error reason = reason_to_give_up(call, task);
  reason.op = task.collective.op;
  if (reason.code == ErrorCode::none) return task.rethrow();
  trace_and_testify(call, reason);
  end(reason.code, reason.peer);
  Call unhurried(kUnlimited);
  task.wait(unhurried);
  try {
    task.rethrow();
  } catch (Error& error) {
    if (error.code != ErrorCode::timeout) throw;
    if (error.reporter == rank_) error.reporter = -1;
    error.elapsed_s = call.elapsed_s();
    if (error.missing.empty()) {  // it had not begun, and knows of nobody
      error.missing = reason.missing;
      error.peer = reason.peer;
    }
    throw;
  }
  // It was done at the last moment, but the group has been told otherwise.
  throw failure(reason, task.collective.op, task.sequence, call);
}

// As Task::wait(). Lets the other ranks know meanwhile if the thread that makes this rank's calls waits for a
// collective.
bool Communicator::await_done(Call& call, Task& task) {
  const bool is_caller = pthread_equal(caller_.load(std::memory_order_relaxed), pthread_self()) != 0;
  if (task.messages != nullptr || task.is_done() || !is_caller) return task.wait(call);
  const auto transport = share(parts_.transport);
  if (transport == nullptr) return task.wait(call);
  struct Note {
    Transport& transport;
    const Call& call;
    Note(Transport& of, const Call& by) : transport(of), call(by) {
      transport.note_waiting_for_collective(call, true);
    }
    ~Note() { transport.note_waiting_for_collective(call, false); }
  } const note(*transport, call);
  return task.wait(call);
}

// Waits for the task. Code none if it is done in time.
Error Communicator::reason_to_give_up(Call& call, Task& task) {
  try {
    if (await_done(call, task)) return Error();
  } catch (const Error& error) {
    return Error(error.code, rank_);
  }
  Error error(ErrorCode::timeout);
  try {
    error.missing = awaited_by(task);  // now: once the group has ended, nobody waits any more
  } catch (const std::bad_alloc&) {
    // Then nobody is named.
  }
  if (!error.missing.empty()) error.peer = error.missing.front();
  return error;
}

}  // namespace ferro
