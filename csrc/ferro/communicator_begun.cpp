// Small asynchronous calls, which the thread that submits them begins: handing them to another thread takes
// ten times as long as they do. What is left then holds up no peer. So it may wait until somebody asks for
// it; only if there is still something to wait for does it become the progress thread's.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <utility>

#include "ferro/clock.hpp"
#include "ferro/communicator.hpp"
#include "ferro/parking.hpp"
#include "ferro/shm_cost.hpp"

namespace ferro {
namespace {

// Up to this size, messages cost their sender less than waking a thread would.
constexpr std::size_t kAtOnceNbytes = 512 * 1024;

// How long a rank that closes waits for a peer that reads one of them: many times as long as that takes,
// since the machine may keep the peer from running.
constexpr std::chrono::milliseconds kReadTime{100};

}  // namespace

bool Communicator::is_done(Task& task) {
  advance(nullptr, task);
  return task.is_done();
}

// Completes a task that this thread or another has begun, if no peer has to be waited for, or none for longer
// than it is worth to spin, which is done for a `call` only. Else hands it to the progress thread.
void Communicator::advance(Call* call, Task& task) {
  if (!task.is_unattended.load(std::memory_order_relaxed)) return;
  task.messages == nullptr ? advance_collective(call) : advance_messages(call, task);
}

// ---- The collective that has begun -----------------------------------------------

// False, with nothing sent, if it has to queue.
bool Communicator::begin_at_once(const std::shared_ptr<Task>& task) {
  if (!collective_gate_.try_enter()) return false;
  Ended ended;
  {
    const Gate::Pass pass(collective_gate_, std::adopt_lock);
    if (is_closed()) return false;
    Transport& transport = *parts_.transport;
    if (begun_ != nullptr) {
      if (transport.linger_until_all_have_begun(nullptr))
        retire(complete_begun());
      else
        hand_over_begun();
    }
    if (collective_queue_.num_pending() != 0) return false;
    try {
      if (!transport.begin(task->collective)) return false;
    } catch (const Error&) {
      return false;  // the group has ended, as the progress thread will report
    }
    task->sequence = next(num_collectives_);
    collective_queue_.add_pending();
    begun_ = task;
    task->is_unattended = true;
    if (transport.have_all_begun()) ended = complete_begun();
  }
  retire(std::move(ended));
  return true;
}

void Communicator::advance_collective(Call* call) {
  if (!collective_gate_.try_enter()) return;  // whoever is inside does the same
  Ended ended;
  {
    const Gate::Pass pass(collective_gate_, std::adopt_lock);
    if (begun_ == nullptr) return;
    if (call != nullptr && begun_->collective.nbytes() > shm_cost::kBriefNbytes) call->begin_blocking();
    const Transport& transport = *parts_.transport;
    if (call != nullptr ? transport.linger_until_all_have_begun(call) : transport.have_all_begun())
      ended = complete_begun();
    else
      hand_over_begun();
  }
  retire(std::move(ended));
}

void Communicator::hand_over_begun() {
  if (!begun_->is_unattended) return;
  collective_queue_.hand_over(nullptr, [this] { run_collectives(); });
  begun_->is_unattended = false;
}

// With the gate held. What it returns is to be retired when the thread has left it: who hears that the
// last task is done may close the group, and must find it idle.
Communicator::Ended Communicator::complete_begun() noexcept {
  Ended ended{std::exchange(begun_, nullptr), std::nullopt};
  if (ended.task == nullptr) return ended;
  ended.task->is_unattended = false;
  try {
    run_now(ended.task->call, ended.task->collective, ended.task->sequence);
  } catch (const std::exception&) {
    ended.error = current_error();
  }
  return ended;
}

void Communicator::retire(Ended ended) noexcept {
  if (ended.task != nullptr) collective_queue_.retire(*ended.task, std::move(ended.error));
}

// ---- Messages that have been posted ------------------------------------------------

// Moves what can be moved now: what a peer's ring has room for, or what has come already, is done before
// another thread could have woken. False, with nothing posted, if the progress thread has to go first.
bool Communicator::post_at_once(const std::shared_ptr<Task>& task) {
  Batch& batch = *task->messages;
  if (Messenger::nbytes_of(batch) > kAtOnceNbytes || !message_gate_->try_enter()) return false;
  Tasks done;
  std::shared_ptr<Messenger> woken;
  {
    const Gate::Pass pass(*message_gate_, std::adopt_lock);
    if (is_closed() || message_queue_.num_waiting() != 0) return false;
    if (parts_.transport->aborted().is_set()) return false;
    Messenger& messenger = *parts_.messenger;
    posted_.push_back(task);
    batch.set_patient(true);
    try {
      messenger.post(batch);
    } catch (const std::bad_alloc&) {
      posted_.pop_back();
      throw;
    }
    task->sequence = next(num_exchanges_);
    task->is_unattended = true;
    message_queue_.add_pending();
    try {
      messenger.progress();
      // A peer that takes over what it is sent is through with it soon.
      const auto may_stay = [&] { return batch.is_done() || messenger.holds_up_nobody(batch); };
      if (!may_stay() && !messenger.linger(nullptr, batch) && !may_stay())
        woken = hand_over(std::prev(posted_.end()));
    } catch (const std::exception&) {
      messenger.end(current_error());
    }
    done = take_done(posted_);
  }
  retire(done);
  if (woken != nullptr) woken->notify();
  return true;
}

void Communicator::advance_messages(Call* call, Task& task) {
  if (call != nullptr && Messenger::nbytes_of(*task.messages) > shm_cost::kBriefNbytes)
    call->begin_blocking();
  if (call != nullptr ? !enter_messages(*call) : !message_gate_->try_enter()) return;
  Tasks done;
  std::shared_ptr<Messenger> woken;
  {
    const Gate::Pass pass(*message_gate_, std::adopt_lock);
    const auto is_meant = [&task](const std::shared_ptr<Task>& posted) { return posted.get() == &task; };
    const auto place = std::find_if(posted_.begin(), posted_.end(), is_meant);
    if (place == posted_.end()) return;
    Messenger& messenger = *parts_.messenger;
    try {
      if (!messenger.linger(call, *task.messages)) woken = hand_over(place);
    } catch (const std::exception&) {
      messenger.end(current_error());
    }
    done = take_done(posted_);
  }
  retire(done);
  if (woken != nullptr) woken->notify();
}

// False if the caller's time ran out first. That ends nothing: the task goes on.
bool Communicator::enter_messages(Call& call) {
  try {
    message_gate_->enter(call);
    return true;
  } catch (const Error& error) {
    if (error.code != ErrorCode::timeout) throw;
    return false;
  }
}

// For a rank that closes: what has come already is received, and what it sent goes where it outlives this
// rank, or to receivers that have just taken it over.
void Communicator::complete_posted() noexcept {
  for (const std::shared_ptr<Task>& task : posted_) task->messages->set_patient(false);
  Messenger& messenger = *parts_.messenger;
  const auto is_sending = [&](const std::shared_ptr<Task>& task) {
    return messenger.is_sending(*task->messages);
  };
  const Clock::time_point deadline = Clock::now() + kReadTime;
  try {
    messenger.progress();
    while (std::any_of(posted_.begin(), posted_.end(), is_sending) && Clock::now() < deadline) {
      sched_yield();
      messenger.progress();
    }
  } catch (const std::exception&) {
    messenger.end(current_error());
  }
  retire(take_done(posted_));
}

// With the gate held. Returns whom to notify when the thread has left it, as a share of this thread's.
std::shared_ptr<Messenger> Communicator::hand_over(Tasks::iterator posted) {
  (*posted)->messages->set_patient(false);
  if (!message_queue_.hand_over(*posted, [this] { run_messages(); }))
    return nullptr;  // close() looks after it
  (*posted)->is_unattended = false;
  posted_.erase(posted);
  return parts_.messenger;
}

// With the gate held. To be retired when the thread has left it: see complete_begun().
Tasks Communicator::take_done(Tasks& tasks) noexcept {
  Tasks done;
  for (auto task = tasks.begin(); task != tasks.end();) {
    const auto next = std::next(task);
    if ((*task)->messages->is_done()) {
      (*task)->is_unattended = false;
      done.splice(done.end(), tasks, task);
    }
    task = next;
  }
  return done;
}

void Communicator::retire(const Tasks& done) noexcept {
  for (const std::shared_ptr<Task>& task : done) message_queue_.retire(*task, outcome(*task));
}

}  // namespace ferro
