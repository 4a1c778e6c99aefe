// Asynchronous calls of a Communicator: on its progress threads, of which collectives have one and messages
// another.
#include <algorithm>
#include <utility>

#include "ferro/clock.hpp"
#include "ferro/communicator.hpp"
#include "ferro/parking.hpp"

namespace ferro {
namespace {

// How long a progress thread spins before it sleeps: it shares its core with the
// very computation that it is there to overlap.
constexpr SpinPolicy kBackgroundSpin{20, 10};

// How long a thread that gives up waiting for a task tries to find out whom the task waits for.
constexpr double kGlanceSeconds = 0.1;

}  // namespace

void Communicator::wait(Call& call, Task& task) {
  do {
    advance(&call, task);
    if (task.messages == nullptr && !task.is_done()) check_outside(task.collective.op, task.sequence, call);
    if (await_done(call, task)) return;
  } while (!call.is_expired());  // who was attending to it has failed to
  Error error(ErrorCode::under_way);
  error.op = task.collective.op;
  error.sequence = task.sequence;
  error.rank = rank_;
  error.global_ranks = global_ranks_;
  error.elapsed_s = call.timeout_s();
  error.missing = awaited_by(task);
  if (error.missing.size() == 1) error.peer = error.missing.front();
  if (!task.is_done()) throw error;
}

// Whom a task waits for or, before its turn, whom what is in front of it waits for. Empty where that is
// not known.
std::vector<int> Communicator::awaited_by(const Task& task) {
  if (task.messages == nullptr) {
    RankSet ranks;
    if (const auto transport = share(parts_.transport)) transport->add_awaited(ranks);
    return ranks_of(ranks);
  }
  try {
    Call brief(kGlanceSeconds);
    const Gate::Pass pass(*message_gate_, brief);
    if (!is_closed()) return parts_.messenger->awaited_by(*task.messages);
  } catch (const Error&) {
    // The thread that holds the gate is kept from running.
  }
  return Messenger::peers_of(*task.messages);
}

std::shared_ptr<Task> Communicator::submit(const Collective& collective, double timeout_s) {
  check_open();
  note_caller();
  auto task = std::make_shared<Task>(collective, world_size_, timeout_s);
  if (!begin_at_once(task)) enqueue(task);
  return task;
}

std::shared_ptr<Task> Communicator::submit(Op op, const std::vector<PointToPoint>& messages,
                                           double timeout_s) {
  check_open();
  note_caller();
  auto task = std::make_shared<Task>(op, messages, timeout_s);
  if (!post_at_once(task)) enqueue(task);
  return task;
}

void Communicator::enqueue(const std::shared_ptr<Task>& task) {
  if (task->messages == nullptr) return collective_queue_.push(task, [this] { run_collectives(); });
  message_queue_.push(task, [this] { run_messages(); });
  notify();
}

void Communicator::complete_handed_over() noexcept {
  Ended ended;
  {
    Call unhurried(kUnlimited);
    const Gate::Pass pass(collective_gate_, unhurried);
    // Even what was not handed over, if somebody has been faster: a waiter that finds the gate taken relies
    // on it.
    if (!collective_queue_.is_stopped()) ended = complete_begun();
  }
  retire(std::move(ended));
}

void Communicator::run_collectives() noexcept {
  for (std::shared_ptr<Task> task; collective_queue_.pop(task);) {
    if (task == nullptr) {
      complete_handed_over();
      continue;
    }
    task->call.begin_blocking();
    Ended ended{task, std::nullopt};
    try {
      const Gate::Pass pass = enter(collective_gate_, task->call, task->collective.op, num_collectives_);
      // close() has found the gate free, and will not end what starts now.
      if (collective_queue_.is_stopped()) throw abandoned(*task);
      retire(complete_begun());  // now: its waiter may be what lets the peers come to this task
      task->sequence = next(num_collectives_);
      run_now(task->call, task->collective, task->sequence);
      task->ended_ns = now_ns();
    } catch (const std::exception&) {
      ended.error = current_error();
    }
    retire(std::move(ended));
  }
  collective_queue_.abandon([this](const Task& task) { return abandoned(task); });
}

void Communicator::run_messages() noexcept {
  Tasks under_way;
  while (!under_way.empty() || message_queue_.await_task()) retire(move_messages(under_way));
  Call unhurried(kUnlimited);
  {
    const Gate::Pass pass(*message_gate_, unhurried);
    parts_.messenger->end(Error(ErrorCode::closed));  // what is abandoned may have been posted
  }
  message_queue_.abandon([this](const Task& task) { return abandoned(task); });
}

// Moves messages until at least one task is done. Returns those that are, and those that nobody attended to.
Tasks Communicator::move_messages(Tasks& under_way) noexcept {
  Call unhurried(kUnlimited);
  const Gate::Pass pass(*message_gate_, unhurried);
  Messenger& messenger = *parts_.messenger;  // close() waits for this thread to end
  const auto is_done = [](const std::shared_ptr<Task>& task) { return task->messages->is_done(); };
  try {
    unsigned num_passes = 0;
    for (int idle = 0; std::none_of(under_way.begin(), under_way.end(), is_done);) {
      const std::uint32_t heard = messenger.news();
      start_submitted(under_way);
      if (message_queue_.is_stopped()) throw Error(ErrorCode::closed);
      if (under_way.empty()) return {};
      if (!messenger.progress()) {
        await_messages(under_way, ++idle, heard);
        continue;
      }
      idle = 0;
      if (++num_passes % Messenger::kPassesPerCheck != 0) continue;
      check_messages(under_way);
      messenger.make_way(unhurried);
    }
  } catch (const std::exception&) {
    messenger.end(current_error());
  }
  Tasks done = take_done(under_way);
  if (under_way.empty()) messenger.relieve();
  done.splice(done.end(), take_done(posted_));
  return done;
}

void Communicator::start_submitted(Tasks& under_way) noexcept {
  if (message_queue_.num_waiting() == 0) return;
  for (Tasks submitted = message_queue_.pop_all(); !submitted.empty();) {
    try {
      start(*submitted.front());
      under_way.splice(under_way.end(), submitted, submitted.begin());
    } catch (const std::bad_alloc&) {  // nothing of it was sent
      message_queue_.retire(*submitted.front(), current_error());
      submitted.pop_front();
    }
  }
}

void Communicator::start(Task& task) {
  if (!task.has_begun()) {
    parts_.messenger->post(*task.messages);
    task.sequence = next(num_exchanges_);
  }
  task.call.begin_blocking();
}

void Communicator::check_messages(const Tasks& under_way) const {
  parts_.transport->aborted().throw_if_set();
  for (const std::shared_ptr<Task>& task : under_way)
    if (!task->messages->is_done() && task->call.is_expired())
      parts_.messenger->throw_timeout(*task->messages);
}

void Communicator::await_messages(const Tasks& under_way, int idle, std::uint32_t heard) {
  if (!message_gate_->is_awaited() && kBackgroundSpin.linger(idle)) return;
  check_messages(under_way);
  for (const std::shared_ptr<Task>& task : under_way) Messenger::set_owner_away(*task->messages, true);
  Call unhurried(kUnlimited);
  parts_.messenger->sleep(unhurried, heard);
  for (const std::shared_ptr<Task>& task : under_way) Messenger::set_owner_away(*task->messages, false);
}

// The error of a task that is not run any more, as this rank has closed the group.
Error Communicator::abandoned(const Task& task) noexcept {
  return failure(Error(ErrorCode::closed), task.collective.op, task.sequence, task.call);
}

// The error that a task ends with once its messages are done, if any.
std::optional<Error> Communicator::outcome(const Task& task) noexcept {
  try {
    task.messages->rethrow();
  } catch (const std::exception&) {
    return failure(current_error(), task.collective.op, task.sequence, task.call);
  }
  return std::nullopt;
}

}  // namespace ferro
