#include "nccl/reaper.hpp"

#include <algorithm>
#include <iterator>
#include <system_error>
#include <thread>

#include "nccl/device_guard.hpp"

namespace ferro::nccl {
namespace {

constexpr std::chrono::milliseconds kBetweenSteps{1};
// How long an abort may take once the time for a healthy end is up: see Communicator::abort.
constexpr double kAbortGrace = 2;  // seconds
// Whoever gives more seconds, or infinitely many, waits for so many: the clock counts no further than 292
// years.
constexpr double kLongestWait = 1e9;

Patience::Clock::time_point after(double seconds) {
  const std::chrono::duration<double> wait(std::min(seconds, kLongestWait));
  return Patience::Clock::now() + std::chrono::duration_cast<Patience::Clock::duration>(wait);
}

}  // namespace

Reaper& Reaper::instance() {
  static auto& reaper = *new Reaper;  // never destroyed: objects are collected to the very end
  return reaper;
}

void Reaper::end(std::shared_ptr<Communicator> communicator, double grace_s) noexcept {
  communicator->begin_end();
  const std::lock_guard<std::mutex> lock(lock_);
  if (communicator->is_ended()) return;
  const auto ending = find(communicator);
  if (ending != endings_.end()) {
    ending->deadline = std::min(ending->deadline, after(grace_s));
    return;
  }
  if (is_stopping_) return communicator->leave_to_system();
  endings_.push_back({communicator, after(grace_s)});
  start_ending(communicator);
}

void Reaper::start_ending(const std::shared_ptr<Communicator>& communicator) {
  const auto advance_once = [this, communicator] { return advance(communicator); };
  try {
    std::thread([advance_once] {
      while (!advance_once()) std::this_thread::sleep_for(kBetweenSteps);
    }).detach();
  } catch (const std::system_error&) {  // no more threads can be made: it shares that of the tasks
    add_task(advance_once);
  }
}

bool Reaper::advance(const std::shared_ptr<Communicator>& communicator) noexcept {
  stay_on_device(communicator->cuda(), communicator->device());
  Patience::Clock::time_point deadline;
  {
    const std::lock_guard<std::mutex> lock(lock_);
    deadline = find(communicator)->deadline;
  }
  if (!communicator->advance_end(deadline)) return false;
  const std::lock_guard<std::mutex> lock(lock_);
  endings_.erase(find(communicator));
  changed_.notify_all();
  return true;
}

std::vector<Reaper::Ending>::iterator Reaper::find(const std::shared_ptr<Communicator>& communicator) {
  return std::find_if(endings_.begin(), endings_.end(),
                      [&](const Ending& each) { return each.communicator == communicator; });
}

void Reaper::run(Task task) noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!is_stopping_) add_task(std::move(task));
}

void Reaper::add_task(Task task) {
  tasks_.push_back(std::move(task));
  changed_.notify_all();
  if (is_working_) return;
  try {
    std::thread(&Reaper::work, this).detach();
    is_working_ = true;
  } catch (const std::system_error&) {  // the next task tries again
  }
}

void Reaper::work() noexcept {
  std::unique_lock<std::mutex> lock(lock_);
  for (;;) {
    changed_.wait(lock, [&] { return !tasks_.empty() || is_stopping_; });
    if (is_stopping_ && (tasks_.empty() || Patience::Clock::now() >= stops_by_)) break;
    std::vector<Task> tasks;
    tasks.swap(tasks_);
    lock.unlock();
    tasks.erase(std::remove_if(tasks.begin(), tasks.end(), [](const Task& task) { return task(); }),
                tasks.end());
    lock.lock();
    std::move(tasks.begin(), tasks.end(), std::back_inserter(tasks_));
    if (!tasks_.empty()) changed_.wait_for(lock, kBetweenSteps);
  }
  is_working_ = false;
  changed_.notify_all();
}

void Reaper::stop(double grace_s) noexcept {
  std::unique_lock<std::mutex> lock(lock_);
  is_stopping_ = true;
  stops_by_ = after(grace_s);
  for (Ending& each : endings_) each.deadline = std::min(each.deadline, stops_by_);
  changed_.notify_all();
  changed_.wait_until(lock, after(grace_s + kAbortGrace), [&] { return is_over(); });
}

bool Reaper::is_stopping() noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  return is_stopping_;
}

bool Reaper::is_over() const { return endings_.empty() && !is_working_; }

}  // namespace ferro::nccl
