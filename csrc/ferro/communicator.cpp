#include "ferro/communicator.hpp"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <utility>

namespace ferro {
namespace {

// How long a progress thread spins before it sleeps: it shares its core with the
// very computation that it is there to overlap.
constexpr SpinPolicy kBackgroundSpin{20, 10};
constexpr double kUnlimited = 1e9;

bool is_fatal(ErrorCode code) {
  return code != ErrorCode::mismatch && code != ErrorCode::size_mismatch && code != ErrorCode::unsupported;
}

// Not fetch_add: only the holder of the gate writes it, and a locked instruction costs more.
std::uint64_t next(std::atomic<std::uint64_t>& number) {
  const std::uint64_t current = number.load(std::memory_order_relaxed);
  number.store(current + 1, std::memory_order_relaxed);
  return current;
}

// Signals are for the caller's threads, which know what to do with them.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace

Communicator::Communicator(int rank, int world_size, Parts parts)
    : rank_(rank),
      world_size_(world_size),
      transport_(std::move(parts.transport)),
      messenger_(std::move(parts.messenger)),
      heap_(std::move(parts.heap)) {}

Communicator::~Communicator() { close(); }

void Communicator::check_open() const {
  if (is_closed()) throw Error(ErrorCode::closed);
}

Error Communicator::failure(Error error, Op op, std::uint64_t sequence, const Call& call) noexcept {
  if (error.code == ErrorCode::interrupted && error.peer < 0) error.peer = rank_;
  if (is_closed()) error.code = ErrorCode::closed;
  error.op = op;
  error.sequence = sequence;
  error.rank = rank_;
  error.elapsed_s = call.elapsed_s();
  const AbortReason reason = transport_->aborted();
  if (reason.code != ErrorCode::none) {
    error.reporter = reason.reporter;
  } else if (error.code == ErrorCode::closed) {
    abort(ErrorCode::channel_closed);
  } else if (is_fatal(error.code)) {
    transport_->abort({error.code, error.peer, rank_, static_cast<std::uint32_t>(sequence)});
  }
  return error;
}

void Communicator::abort(ErrorCode code) noexcept {
  // Who gave up waiting is not to blame for it.
  transport_->abort({code, code == ErrorCode::timeout ? -1 : rank_, rank_, 0});
  messenger_->notify();
}

std::vector<int> Communicator::lost_ranks() const {
  std::vector<int> ranks;
  transport_->add_lost(ranks);
  const AbortReason reason = transport_->aborted();
  if (reason.code == ErrorCode::peer_lost || reason.code == ErrorCode::channel_closed)
    ranks.push_back(reason.culprit);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  ranks.erase(std::remove(ranks.begin(), ranks.end(), rank_), ranks.end());
  return ranks;
}

void Communicator::begin_close() noexcept {
  if (is_closed_.exchange(true, std::memory_order_acq_rel)) return;
  collective_queue_.stop();
  message_queue_.stop();
  const bool is_collective_idle = collective_gate_.try_enter();
  const bool has_entered_messages = message_gate_.try_enter();
  // With all its work done the message thread is on its way out, and keeps nobody waiting.
  const bool is_message_idle =
      has_entered_messages || is_message_thread_inside_.load(std::memory_order_acquire);
  // From here on every call under way fails soon, and leaves its gate. Work that has not
  // begun counts: whether it has is chance, and must make no difference to the peers.
  const bool has_work = collective_queue_.num_pending() != 0 || message_queue_.num_pending() != 0;
  if (!is_collective_idle || !is_message_idle || has_work) abort(ErrorCode::channel_closed);
  if (is_collective_idle) collective_gate_.leave();
  if (has_entered_messages) message_gate_.leave();
}

bool Communicator::close() noexcept {
  begin_close();
  if (has_left_.exchange(true, std::memory_order_acq_rel)) return false;
  Call unhurried(kUnlimited);
  collective_queue_.join();
  message_queue_.join();
  const Gate::Pass collective_pass(collective_gate_, unhurried);
  const Gate::Pass message_pass(message_gate_, unhurried);
  // In this order: a peer whose message never comes asks the transport for the reason.
  transport_->close();
  messenger_->close();
  return true;
}

// ---- Calls on the caller's thread ----------------------------------------------

void Communicator::run(Call& call, const Collective& collective) {
  check_open();
  if (collective_queue_.num_pending() != 0) return await(call, *submit(collective, call.timeout_s()));
  const Gate::Pass pass = enter(collective_gate_, call, collective.op, num_collectives_);
  check_open();
  run_now(call, collective);
}

void Communicator::run_now(Call& call, const Collective& collective) {
  const std::uint64_t sequence = next(num_collectives_);
  try {
    transport_->run(call, collective);
  } catch (const Error& error) {
    throw failure(error, collective.op, sequence, call);
  }
}

void Communicator::exchange(Call& call, Op op, const std::vector<PointToPoint>& messages) {
  check_open();
  if (message_queue_.num_pending() != 0) return await(call, *submit(op, messages, call.timeout_s()));
  const Gate::Pass pass = enter(message_gate_, call, op, num_exchanges_);
  check_open();
  Batch batch(messages);
  const std::uint64_t sequence = next(num_exchanges_);
  try {
    messenger_->run(call, batch);
  } catch (const Error& error) {
    throw failure(error, op, sequence, call);
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

// A call that had to queue. It must not return before the engine has let go of its arrays.
void Communicator::await(Call& call, Task& task) {
  ErrorCode cause = ErrorCode::none;
  try {
    if (!task.wait(call)) cause = ErrorCode::timeout;
  } catch (const Error& error) {
    cause = error.code;
  }
  if (cause != ErrorCode::none) {
    abort(cause);
    Call unhurried(kUnlimited);
    task.wait(unhurried);
  }
  task.rethrow();
  // It was done in the last moment, but the group has been told otherwise.
  if (cause != ErrorCode::none) throw Error(cause, rank_);
}

// ---- Calls on the progress threads ----------------------------------------------

std::shared_ptr<Task> Communicator::submit(const Collective& collective, double timeout_s) {
  check_open();
  auto task = std::make_shared<Task>(collective, world_size_, timeout_s);
  collective_queue_.push(task, [this] { run_collectives(); });
  return task;
}

std::shared_ptr<Task> Communicator::submit(Op op, const std::vector<PointToPoint>& messages,
                                           double timeout_s) {
  check_open();
  auto task = std::make_shared<Task>(op, messages, timeout_s);
  message_queue_.push(task, [this] { run_messages(); });
  messenger_->notify();
  return task;
}

void Communicator::run_collectives() noexcept {
  block_signals();
  while (const std::shared_ptr<Task> task = collective_queue_.pop(true)) {
    Call call(task->timeout_s);
    call.begin_blocking();
    std::unique_ptr<Error> error;
    try {
      const Gate::Pass pass(collective_gate_, call);
      // close() found the gate free, and will not end what starts now.
      if (collective_queue_.is_stopped()) throw Error(ErrorCode::closed);
      run_now(call, task->collective);
    } catch (const Error& caught) {
      error = std::make_unique<Error>(caught);
    }
    collective_queue_.retire(*task, std::move(error));
  }
  collective_queue_.abandon();
}

// From the first message submitted until none is left the thread keeps the gate.
void Communicator::run_messages() noexcept {
  block_signals();
  while (std::shared_ptr<Task> first = message_queue_.pop(true)) {
    is_message_thread_inside_.store(true, std::memory_order_release);
    run_messages_from(std::move(first));
    is_message_thread_inside_.store(false, std::memory_order_release);
  }
  message_queue_.abandon();
}

void Communicator::run_messages_from(std::shared_ptr<Task> first) noexcept {
  Call unhurried(kUnlimited);
  const Gate::Pass pass(message_gate_, unhurried);
  std::vector<UnderWay> under_way;
  try {
    start(under_way, std::move(first));
    for (int idle = 0; !under_way.empty(); ++idle) {
      while (std::shared_ptr<Task> next = message_queue_.pop(false)) start(under_way, std::move(next));
      if (message_queue_.is_stopped()) throw Error(ErrorCode::closed);
      if (messenger_->progress()) idle = 0;
      retire_done(under_way);
      if (idle != 0) await_messages(under_way, idle);
    }
  } catch (const Error& error) {
    fail_all(under_way, error);
  }
}

void Communicator::start(std::vector<UnderWay>& under_way, std::shared_ptr<Task> task) {
  under_way.push_back({task, next(num_exchanges_), Call(task->timeout_s)});
  under_way.back().call.begin_blocking();
  messenger_->post(*task->messages);
}

void Communicator::retire_done(std::vector<UnderWay>& under_way) {
  for (std::size_t i = 0; i < under_way.size();) {
    UnderWay& candidate = under_way[i];
    if (!candidate.task->messages->is_done()) {
      ++i;
      continue;
    }
    std::unique_ptr<Error> error;
    try {
      candidate.task->messages->rethrow();
    } catch (const Error& caught) {
      error = std::make_unique<Error>(
          failure(caught, candidate.task->collective.op, candidate.sequence, candidate.call));
    }
    message_queue_.retire(*candidate.task, std::move(error));
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Communicator::await_messages(std::vector<UnderWay>& under_way, int idle) {
  if (idle < kBackgroundSpin.pauses) return pause_briefly();
  if (idle < kBackgroundSpin.pauses + kBackgroundSpin.yields) {
    sched_yield();
    return;
  }
  const AbortReason reason = transport_->aborted();
  if (reason.code != ErrorCode::none) throw Error(reason.code, reason.culprit);
  for (const UnderWay& candidate : under_way)
    if (candidate.call.is_expired()) messenger_->throw_timeout();
  messenger_->sleep();
}

void Communicator::fail_all(std::vector<UnderWay>& under_way, const Error& error) {
  messenger_->clear();
  for (UnderWay& failed : under_way)
    message_queue_.retire(*failed.task, std::make_unique<Error>(failure(error, failed.task->collective.op,
                                                                        failed.sequence, failed.call)));
  under_way.clear();
}

}  // namespace ferro
