#include "nccl/watchdog.hpp"

#include <algorithm>

#include "nccl/fork.hpp"
#include "nccl/reaper.hpp"

namespace ferro::nccl {
namespace {

// A look costs well below a microsecond for each communicator.
constexpr std::chrono::milliseconds kBetweenLooks{20};

// Those that are alive; the others are forgotten.
template <typename Kind, typename IsOver>
std::vector<std::shared_ptr<Kind>> living(std::vector<std::weak_ptr<Kind>>& watched, IsOver is_over) {
  std::vector<std::shared_ptr<Kind>> alive;
  const auto is_gone = [&](const std::weak_ptr<Kind>& each) {
    auto held = each.lock();
    if (held == nullptr || is_over(*held)) return true;
    alive.push_back(std::move(held));
    return false;
  };
  watched.erase(std::remove_if(watched.begin(), watched.end(), is_gone), watched.end());
  return alive;
}

}  // namespace

Watchdog& Watchdog::instance() {
  static auto& watchdog = *new Watchdog;
  return watchdog;
}

void Watchdog::watch(const std::shared_ptr<Communicator>& communicator) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (is_stopping_) return;
  communicators_.push_back(communicator);
  start();
}

void Watchdog::watch(const std::shared_ptr<Lane>& lane) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (is_stopping_) return;
  lanes_.push_back(lane);
  start();
}

void Watchdog::on_done(void (*hook)()) {
  const std::lock_guard<std::mutex> lock(lock_);
  hook_ = hook;
}

void Watchdog::start() {
  if (!guard_.joinable()) guard_ = std::thread(&Watchdog::work, this, &Watchdog::look_after_all);
  if (!observer_.joinable()) observer_ = std::thread(&Watchdog::work, this, &Watchdog::observe_all);
  changed_.notify_all();
}

std::vector<std::shared_ptr<Communicator>> Watchdog::watched() {
  const std::lock_guard<std::mutex> lock(lock_);
  return living(communicators_, [](const Communicator& each) { return each.is_ended(); });
}

std::vector<std::shared_ptr<Lane>> Watchdog::lanes() {
  const std::lock_guard<std::mutex> lock(lock_);
  return living(lanes_, [](const Lane&) { return false; });
}

void Watchdog::look_after_all() {
  for (auto& communicator : watched())
    if (communicator->discover_error(false)) Reaper::instance().end(std::move(communicator));
  for (const auto& lane : lanes()) lane->look_after();
}

void Watchdog::observe_all() {
  bool is_any_done = false;
  for (const auto& lane : lanes()) {
    const std::uint64_t before = lane->num_seen_done();
    lane->observe();
    is_any_done |= lane->num_seen_done() != before;
  }
  void (*hook)() = nullptr;
  {
    const std::lock_guard<std::mutex> lock(lock_);
    if (is_any_done && !is_stopping_) hook = hook_;
  }
  if (hook != nullptr) hook();
}

void Watchdog::work(Look look) noexcept {
  std::unique_lock<std::mutex> lock(lock_);
  while (!is_stopping_) {
    if (communicators_.empty() && lanes_.empty())
      changed_.wait(lock);
    else
      changed_.wait_for(lock, kBetweenLooks);
    lock.unlock();
    (this->*look)();
    lock.lock();
  }
}

void Watchdog::stop() noexcept {
  {
    const std::lock_guard<std::mutex> lock(lock_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread* each : {&guard_, &observer_})
    if (each->joinable()) each->join();
}

void shut_down(double grace_s) noexcept {
  if (is_forked_copy()) return;
  for (auto& communicator : Watchdog::instance().watched())
    Reaper::instance().end(std::move(communicator), grace_s);
  Watchdog::instance().stop();
  Reaper::instance().stop(grace_s);
}

}  // namespace ferro::nccl
