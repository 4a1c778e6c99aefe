#include "emulation/nccl/communicator.hpp"

#include <algorithm>
#include <array>
#include <chrono>

#include "emulation/blocked_signals.hpp"
#include "emulation/nccl/cudart_functions.hpp"

namespace emulation {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);

std::mutex last_error_mutex;

std::string& shared_last_error() {
  static std::string& text = *new std::string;
  return text;
}

}  // namespace

FaultPlan& fault_plan() {
  static FaultPlan& plan = *new FaultPlan;
  return plan;
}

void suffer(const Fault& fault, const char* function, Communicator& communicator) {
  switch (fault.act) {
    case Act::none:
    case Act::stuck:  // has already been suffered inside FaultPlan::next
      return;
    case Act::slow:
      std::this_thread::sleep_for(std::chrono::milliseconds(fault.ms));
      return;
    case Act::hang:
      // Never over, unless an abort interrupts it.
      while (!communicator.stop().load(std::memory_order_relaxed)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      throw Interrupted{};
    case Act::remote_error:
      fail(ncclRemoteError, function, ": remote error, as FERRO_EMULATION_FAULT asks");
    case Act::async_error:
      fail(ncclInternalError, function, ": internal error, as FERRO_EMULATION_FAULT asks");
    case Act::system_error:
      fail(ncclSystemError, function, ": system error, as FERRO_EMULATION_FAULT asks");
    case Act::out_of_memory:
      fail(ncclUnhandledCudaError, function, ": out of memory, as FERRO_EMULATION_FAULT asks");
  }
}

void set_last_error(const std::string& text) {
  const std::lock_guard<std::mutex> lock(last_error_mutex);
  shared_last_error() = text;
}

const char* last_error() {
  thread_local std::string copy;  // what the caller reads must not change under it
  const std::lock_guard<std::mutex> lock(last_error_mutex);
  copy = shared_last_error();
  return copy.c_str();
}

Communicator::~Communicator() {
  window_service_.reset();
  for (const cudaEvent_t event : {last_launch, last_captured}) {
    if (event != nullptr && getpid() == pid) cudart().event_destroy(event);
  }
}

ncclResult_t Communicator::run(std::function<void()> job) {
  set_busy(true);
  if (is_blocking()) {
    run_in_thread(job);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_ != ncclSuccess) throw Failure{error_, last_error()};
    return ncclSuccess;
  }
  std::array<int, 2> asker{};
  cudart().get_asker(asker.data());
  const BlockedSignals blocked;
  std::thread([self = shared_from_this(), job = std::move(job), asker] {
    cudart().ask_for(asker.data());
    cudart().set_device(self->device);
    self->run_in_thread(job);
  }).detach();
  return ncclInProgress;
}

void Communicator::run_in_thread(const std::function<void()>& job) {
  try {
    job();
  } catch (const Failure& failure) {
    fail_later(failure.code, failure.text);
  } catch (const Interrupted&) {
    fail_later(ncclInternalError, "aborted");
  } catch (const std::exception& error) {
    fail_later(ncclInternalError, error.what());
  }
  set_busy(false);
}

void Communicator::set_busy(bool is_busy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_busy_ = is_busy;
  changed_.notify_all();
}

void Communicator::begin_child(const std::shared_ptr<Communicator>& child) {
  child->set_busy(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  child_ = child;
}

void Communicator::end_child() {
  std::shared_ptr<Communicator> child;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    child = std::move(child_);
  }
  child->set_busy(false);
}

ncclResult_t Communicator::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_ != ncclSuccess) return error_;
  return is_busy_ ? ncclInProgress : ncclSuccess;
}

void Communicator::fail_later(ncclResult_t code, const std::string& text) {
  // Like the real one, it holds a pointer to the caller's text, not a copy.
  set_last_error(config.commName == nullptr ? text : std::string(config.commName) + ": " + text);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_ == ncclSuccess) error_ = code;
}

void Communicator::forget_error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = ncclSuccess;
}

void Communicator::require_ready(const char* function) {
  const ncclResult_t now = state();
  require(now != ncclInProgress, ncclInvalidArgument, function,
          " while the communicator is in progress: poll ncclCommGetAsyncError until it is not");
  require(now == ncclSuccess, now, function, " on a communicator in error: ", last_error());
}

void Communicator::require_usable(const char* function) {
  require_ready(function);
  require_not_finalized(function);
  require(!is_revoked, ncclInvalidUsage, function, " on a communicator that was revoked");
  require(!is_suspended, ncclInvalidUsage, function, " on a communicator that is suspended");
}

void Communicator::require_not_finalized(const char* function) {
  require(!is_finalized, ncclInvalidUsage, function, " on a communicator that was finalized");
}

void Communicator::connect() {
  int num_devices = 0;
  check(cudart().get_device_count(&num_devices));
  Newcomer self;
  self.rank = rank;
  self.num_ranks = num_ranks;
  self.device = device;
  self.num_devices = num_devices;
  segment_ = std::make_unique<Segment>(meet(id, self, stop_), rank, num_ranks);
  segment_->barrier(Barrier::control, stop_);
}

void Communicator::finalize() {
  await_no_pending();
  await_graphs("ncclCommFinalize");
  // Over a network it waits for nobody.
  if (!Segment::notices_ends()) segment_->barrier(Barrier::control, stop_);
  is_finalized = true;
}

void Communicator::revoke() {
  stop_all_operations();
  is_revoked = true;
}

void Communicator::stop_operations() {
  operations_stop_.store(true, std::memory_order_relaxed);
  if (segment_) segment_->ring();
  const std::lock_guard<std::mutex> over(running);  // whatever ran has seen the flag
}

void Communicator::abort() {
  stop_.store(true, std::memory_order_relaxed);
  operations_stop_.store(true, std::memory_order_relaxed);
  {
    // The job may be about to make the segment, or be waiting in it.
    std::unique_lock<std::mutex> lock(mutex_);
    while (is_busy_) {
      if (child_) child_->stop_.store(true, std::memory_order_relaxed);
      if (segment_) segment_->ring();
      changed_.wait_for(lock, std::chrono::milliseconds(5));
    }
  }
  stop_all_operations();
}

void Communicator::stop_all_operations() {
  stop_operations();
  for (const auto& each : sharing) {
    if (const auto other = each.lock()) other->stop_operations();
  }
}

void Communicator::await_graphs(const char* function) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto are_gone = [this] { return num_graphs_ == 0; };
  if (changed_.wait_for(lock, kPatience, are_gone)) return;
  complain(function, " waits for ", num_graphs_,
           " CUDA graph nodes that captured the communicator: destroy the graphs first, as with a real NCCL");
  changed_.wait(lock, are_gone);
}

void Communicator::share_with(const std::shared_ptr<Communicator>& other) {
  sharing.push_back(other);
  other->sharing.push_back(weak_from_this());
}

bool Communicator::shares_resources() const {
  return std::any_of(sharing.begin(), sharing.end(), [](const auto& other) { return !other.expired(); });
}

void Communicator::require_no_race(const std::vector<const Communicator*>& group) {
  for (const auto& each : sharing) {
    const auto other = each.lock();
    if (std::find(group.begin(), group.end(), other.get()) != group.end()) continue;
    require(other == nullptr || other->state() != ncclInProgress, ncclInvalidUsage,
            "Fatal: host threads racing to launch on communicators that share resources");
  }
}

void Communicator::synchronize() {
  if (last_launch != nullptr) cudart().event_synchronize(last_launch);
}

void Communicator::release() {
  const std::lock_guard<std::mutex> lock(running);
  window_service_.reset();
  if (segment_) segment_->leave();
  segment_.reset();
}

void Communicator::await_no_pending() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (num_pending_ > 0) {
    if (stop_.load(std::memory_order_relaxed)) throw Interrupted{};
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
}

WindowService& Communicator::window_service() {
  if (!window_service_) window_service_ = std::make_unique<WindowService>(*segment_);
  return *window_service_;
}

void Communicator::add_pending() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_pending_;
}

void Communicator::remove_pending() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --num_pending_;
  changed_.notify_all();
}

void Communicator::add_graph() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_graphs_;
}

void Communicator::remove_graph() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --num_graphs_;
  changed_.notify_all();
}

}  // namespace emulation
