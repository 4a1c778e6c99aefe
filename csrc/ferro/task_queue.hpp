// Tasks on their way to a progress thread. A null pointer among them is a nudge: the thread is to look after
// what has no place in the queue.
#ifndef FERRO_TASK_QUEUE_HPP
#define FERRO_TASK_QUEUE_HPP

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "ferro/background_thread.hpp"
#include "ferro/task.hpp"

namespace ferro {

// Lists, so that tasks can pass from one to another without allocating.
using Tasks = std::list<std::shared_ptr<Task>>;

class TaskQueue {
 public:
  // Tasks pushed, or counted by add_pending(), and not yet retired. A call may run on its caller's thread
  // only at zero.
  int num_pending() const { return num_pending_.load(std::memory_order_acquire); }

  // The first task starts the queue's thread, which runs `progress`.
  template <class Progress>
  void push(std::shared_ptr<Task> task, Progress progress) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped()) throw Error(ErrorCode::closed);
    enqueue(std::move(task), std::move(progress));
    add_pending();
  }
  // The same for one that is pending already, or for a nudge. False if the queue was stopped.
  template <class Progress>
  bool hand_over(std::shared_ptr<Task> task, Progress progress) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped()) return false;
    enqueue(std::move(task), std::move(progress));
    return true;
  }
  // Counts a task as pending that is not pushed; retire() ends that, too.
  void add_pending() { num_pending_.fetch_add(1, std::memory_order_acq_rel); }

  // Tasks and nudges, pushed or handed over, and not yet popped.
  int num_waiting() const { return num_waiting_.load(std::memory_order_acquire); }

  // Waits until a task can be popped. False if the queue was stopped.
  bool await_task() {
    std::unique_lock<std::mutex> lock(mutex_);
    return await_task(lock);
  }

  // The next task or nudge, waiting for one. False if the queue was stopped.
  bool pop(std::shared_ptr<Task>& task) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!await_task(lock)) return false;
    task = std::move(tasks_.front());
    tasks_.pop_front();
    num_waiting_.fetch_sub(1, std::memory_order_acq_rel);
    return true;
  }

  // All tasks there are; none if the queue was stopped.
  Tasks pop_all() noexcept {
    Tasks all;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped()) return all;
    all.swap(tasks_);
    num_waiting_.fetch_sub(static_cast<int>(all.size()), std::memory_order_acq_rel);
    return all;
  }

  // Reports a task done. It stops counting as pending first, so that its waiter's next call may run
  // on its own thread.
  void retire(Task& task, std::optional<Error> error) noexcept {
    num_pending_.fetch_sub(1, std::memory_order_acq_rel);
    task.finish(std::move(error));
  }

  bool is_stopped() const { return is_stopped_.load(std::memory_order_acquire); }

  // Takes no more tasks, and ends the waits of pop(). Returns whether any were pending: afterwards the
  // thread abandons them at once.
  bool stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool had_work = num_pending() != 0;
    is_stopped_.store(true, std::memory_order_release);
    has_changed_.notify_all();
    return had_work;
  }

  // Once stopped, called by the queue's thread as its last act: fails what nobody will run, each task with
  // the error that `error_of` makes of it.
  template <class ErrorOf>
  void abandon(ErrorOf error_of) noexcept {
    Tasks left;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      left.swap(tasks_);
    }
    for (const std::shared_ptr<Task>& task : left)
      if (task != nullptr) retire(*task, error_of(*task));
  }

  // Stops, and waits for the thread to end.
  void join() {
    stop();  // else a task that is pushed meanwhile would start another thread
    if (thread_.joinable()) thread_.join();
  }

 private:
  template <class Progress>
  void enqueue(std::shared_ptr<Task> task, Progress progress) {
    if (!thread_.joinable()) thread_ = start_thread("ferro-progress", std::move(progress));
    tasks_.push_back(std::move(task));
    num_waiting_.fetch_add(1, std::memory_order_acq_rel);
    has_changed_.notify_one();
  }

  bool await_task(std::unique_lock<std::mutex>& lock) {
    has_changed_.wait(lock, [this] { return is_stopped() || !tasks_.empty(); });
    return !is_stopped();
  }

  std::mutex mutex_;  // guards tasks_ and thread_
  std::condition_variable has_changed_;
  Tasks tasks_;
  std::thread thread_;
  std::atomic<int> num_pending_{0};
  std::atomic<int> num_waiting_{0};
  std::atomic<bool> is_stopped_{false};
};

}  // namespace ferro

#endif  // FERRO_TASK_QUEUE_HPP
