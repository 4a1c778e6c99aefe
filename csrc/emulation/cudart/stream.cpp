#include "emulation/cudart/stream.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "emulation/blocked_signals.hpp"
#include "emulation/environment.hpp"

namespace emulation {
namespace {

// How long an operation waits at most for its asker, which may have the lowest priority on its core.
constexpr auto kPatience = std::chrono::seconds(10);

thread_local Activity activity;
thread_local Asker principal;

long long nanoseconds(clockid_t clock) {
  timespec time{};
  return clock_gettime(clock, &time) == 0 ? time.tv_sec * 1'000'000'000LL + time.tv_nsec : -1;
}

// False for one that sleeps, and one that has ended.
bool is_runnable(int thread) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return false;
  char text[256];
  const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[length] = '\0';
  const char* after_name = std::strrchr(text, ')');
  return after_name != nullptr && std::strncmp(after_name, ") R", 3) == 0;
}

void be_late(const Asker& asker, int late_us) {
  const auto start = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(std::chrono::microseconds(late_us));
  while (!asker.has_had_time(late_us * 1000LL) && std::chrono::steady_clock::now() - start < kPatience) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// How many operations a stream takes before it blocks the thread that gives it more, and with that
// all of CUDA. A GPU's takes about a thousand.
std::size_t max_items() {
  static const auto most = static_cast<std::size_t>(setting("STREAM_DEPTH", 1 << 30, 1, 1 << 30));
  return most;
}

std::atomic<int>& delay() {
  static std::atomic<int> microseconds{static_cast<int>(setting("DELAY_US", 0, 0, 10'000'000))};
  return microseconds;
}

// Relaxed: nothing else is published with this setting.
int delay_us() { return delay().load(std::memory_order_relaxed); }

}  // namespace

void set_delay_us(int microseconds) { delay().store(microseconds, std::memory_order_relaxed); }

Asker Asker::here() {
  Asker asker = principal;
  if (asker.thread == 0) {
    asker.thread = gettid();
    pthread_getcpuclockid(pthread_self(), &asker.clock);
  }
  asker.cpu_ns = nanoseconds(asker.clock);
  return asker;
}

bool Asker::has_had_time(long long needed_ns) const {
  const long long now_ns = nanoseconds(clock);
  return now_ns < 0 || now_ns - cpu_ns >= needed_ns || !is_runnable(thread);
}

void ask_for(const Asker& asker) { principal = asker; }

Activity current_activity() { return activity; }
void set_activity(const char* operation) { activity.operation = operation; }

void Milestone::reach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_reached_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Milestone::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_reached_; });
}

bool Milestone::is_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_reached_;
}

std::chrono::steady_clock::time_point Milestone::time() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

StreamPtr Stream::start(cudaStream_t handle, int device, unsigned flags) {
  StreamPtr stream(new Stream(handle, device, flags));
  const BlockedSignals blocked;
  // Detached, and a co-owner of the stream: destroying a stream does not wait for its work.
  std::thread([stream] { stream->work(); }).detach();
  return stream;
}

MilestonePtr Stream::submit(Operation operation) {
  auto done = std::make_shared<Milestone>();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return items_.size() < max_items(); });
  items_.push_back({std::move(operation), delay_us() > 0 ? Asker::here() : Asker{}, done});
  latest_ = done;
  changed_.notify_all();
  return done;
}

MilestonePtr Stream::latest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return latest_;
}

void Stream::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  changed_.notify_one();
}

void Stream::work() {
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_closed_ || !items_.empty(); });
    if (items_.empty()) return;
    const Item item = std::move(items_.front());
    items_.pop_front();
    changed_.notify_all();
    lock.unlock();
    carry_out(item);
    item.done->reach();
  }
}

void Stream::carry_out(const Item& item) const {
  const Operation& operation = item.operation;
  for (const MilestonePtr& milestone : operation.after) milestone->wait();
  const int late_us = operation.is_delayed ? delay_us() : 0;
  if (late_us > 0) be_late(item.asker, late_us);
  activity = {operation.name, handle, device};
  if (operation.run) operation.run();
  activity = {};
}

}  // namespace emulation
