#include "nccl/communicator.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <thread>

#include "abi/stream_capture.hpp"
#include "nccl/device_guard.hpp"
#include "nccl/device_lock.hpp"
#include "nccl/fork.hpp"
#include "nccl/library.hpp"
#include "nccl/reaper.hpp"
#include "nccl/turn.hpp"
#include "nccl/watchdog.hpp"

namespace ferro::nccl {
namespace {

// How long a call that is inside NCCL is waited for by what cannot be refused.
constexpr std::chrono::seconds kCallGrace{1};
constexpr std::chrono::microseconds kBetweenTries{50};
// How long, in seconds, a thing that is given back waits for its turn before others go first.
constexpr double kTurnGrace = 1;

Error ended(ErrorKind kind) {
  Error error(kind);
  error.is_fatal = true;
  return error;
}

// Whether an option is in force, which the environment overrides.
bool is_chosen(int option, const char* variable) {
  const char* forced = std::getenv(variable);
  return (forced == nullptr || *forced == '\0' ? option : std::atoi(forced)) == 1;
}

// Without the lock if a call is inside NCCL for longer: it may hang there.
std::unique_lock<std::mutex> lock_within(std::chrono::seconds grace, std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  const auto deadline = Patience::Clock::now() + grace;
  while (!lock.owns_lock() && Patience::Clock::now() < deadline) {
    std::this_thread::sleep_for(kBetweenTries);
    lock.try_lock();
  }
  return lock;
}

void refuse_forked_copy() {
  if (is_forked_copy()) throw ended(ErrorKind::forked);
}

// On communicators that do not block, too, NCCL returns ncclSuccess from split, shrink, grow and the
// registration of windows when it has only begun. What they make is there once the communicator's state
// is ncclSuccess.
ncclResult_t begun(ncclResult_t result) { return result == ncclSuccess ? ncclInProgress : result; }

// Gives something back, on the reaper's thread; true once that is done. A communicator that has ended took it
// along, and one that another call keeps busy is asked again.
template <typename GiveBack>
bool give_back_quietly(const Communicator& communicator, GiveBack give_back) noexcept {
  stay_on_device(communicator.cuda(), communicator.device());
  Patience patience(kTurnGrace);
  try {
    give_back(patience);
    return true;
  } catch (const Error& error) {
    return error.kind != ErrorKind::timeout || communicator.has_failed();
  } catch (const std::exception&) {
    return true;
  }
}

// Has whatever waits in the connections of `comm` give up, but frees nothing. A child that grows waits there,
// too, where it looks at the parent's flags alone: its own abort would wait for it.
void revoke_quietly(ncclComm_t comm) noexcept {
  if (comm == nullptr || ncclCommRevoke == nullptr) return;
  const auto deadline = Patience::Clock::now() + kCallGrace;
  ncclResult_t state = ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT);
  while (state == ncclInProgress && Patience::Clock::now() < deadline) {
    std::this_thread::sleep_for(kBetweenTries);
    if (ncclCommGetAsyncError(comm, &state) != ncclSuccess) return;
  }
}

}  // namespace

Communicator::Communicator(const Cudart& cuda, int device)
    : cuda_(cuda), device_(device), num_forks_(num_forks()), lock_(device_lock(device)) {}

// --- Making one

template <typename Call>
std::shared_ptr<Communicator> Communicator::make(const char* function, const Cudart& cuda, int device,
                                                 ncclConfig_t& config, Patience& patience, Call call) {
  refuse_forked_copy();
  auto self = std::make_shared<Communicator>(cuda, device);
  self->keep_options(config);
  if (patience.alarm() != nullptr) self->hear([alarm = *patience.alarm()] { return error_of_loss(alarm()); });
  const DeviceGuard guard(cuda, device);
  ncclResult_t result;
  {
    const Lock lock = lock_patiently(self->lock_, function, patience);
    result = call(&self->newborn_);
  }
  self->complete(result, function, patience);
  return self;
}

std::shared_ptr<Communicator> Communicator::init(const Cudart& cuda, int device,
                                                 const std::vector<ncclUniqueId>& ids, int world_size,
                                                 int rank, ncclConfig_t config, Patience& patience) {
  const char* function = ids.size() == 1 ? "ncclCommInitRankConfig" : "ncclCommInitRankScalable";
  if (ids.size() > 1) require(ncclCommInitRankScalable, function, "2.23");
  return make(function, cuda, device, config, patience, [&](ncclComm_t* made) {
    auto some = ids;
    return ids.size() == 1 ? ncclCommInitRankConfig(made, world_size, ids[0], rank, &config)
                           : ncclCommInitRankScalable(made, world_size, rank, static_cast<int>(ids.size()),
                                                      some.data(), &config);
  });
}

std::shared_ptr<Communicator> Communicator::join(const Cudart& cuda, int device, const ncclUniqueId& id,
                                                 int world_size, int rank, ncclConfig_t config,
                                                 Patience& patience) {
  require(ncclCommGrow, "ncclCommGrow", "2.29.2");
  return make("ncclCommGrow", cuda, device, config, patience,
              [&](ncclComm_t* made) { return ncclCommGrow(nullptr, world_size, &id, rank, made, &config); });
}

void Communicator::keep_options(ncclConfig_t& config) {
  for (const char** text : {&config.netName, &config.commName}) {
    if (*text == nullptr) continue;
    texts_.push_back(std::make_unique<const std::string>(*text));
    *text = texts_.back()->c_str();
  }
  shares_with_split_ = is_chosen(config.splitShare, "NCCL_COMM_SPLIT_SHARE_RESOURCES");
  shares_with_shrunk_ = is_chosen(config.shrinkShare, "NCCL_COMM_SHRINK_SHARE_RESOURCES");
}

void Communicator::adopt_into_family(const std::shared_ptr<Communicator>& child) {
  child->family_ = family_;
  const std::lock_guard<std::mutex> lock(family_->lock);
  auto& members = family_->members;
  const auto is_gone = [](const auto& member) { return member.expired(); };
  members.erase(std::remove_if(members.begin(), members.end(), is_gone), members.end());
  if (members.empty()) members.push_back(weak_from_this());
  members.push_back(child);
}

std::vector<std::shared_ptr<Communicator>> Communicator::stop_family() noexcept {
  is_stopped_.store(true, std::memory_order_release);
  std::vector<std::shared_ptr<Communicator>> others;
  {
    const std::lock_guard<std::mutex> lock(family_->lock);
    for (const auto& member : family_->members)
      if (auto other = member.lock(); other != nullptr && other.get() != this) others.push_back(other);
  }
  const auto is_over = [](const auto& other) { return other->is_ended() || other->is_aborted(); };
  others.erase(std::remove_if(others.begin(), others.end(), is_over), others.end());
  for (const auto& other : others) other->fail(ended(ErrorKind::aborted));
  return others;
}

template <typename Make>
std::shared_ptr<Communicator> Communicator::make_child(const char* function, ncclConfig_t& config,
                                                       bool is_sharing, Patience& patience, Make make) {
  auto child = std::make_shared<Communicator>(cuda_, device_);
  child->keep_options(config);
  child->first_error_.ask_witness_of(first_error_);
  const DeviceGuard guard(cuda_, device_);
  {
    Turn turn(*this, function, patience);
    check_not_finalized(function);
    if (is_sharing && !is_revoked_) adopt_into_family(child);  // what is revoked shares nothing with others
    unfinished_.push_back(child);
    turn.settle(begun(make(handle(), &child->newborn_)));
    child->adopt_newborn();
    if (child->handle() != nullptr) turn.await_child(*child);
    unfinished_.erase(std::find(unfinished_.begin(), unfinished_.end(), child));
  }
  if (child->handle() == nullptr) return nullptr;
  child->complete(ncclSuccess, function, patience);
  child->hear(nullptr);  // our witness, who knows ranks by the numbers that they have here
  return child;
}

std::shared_ptr<Communicator> Communicator::split(int color, int key, ncclConfig_t config,
                                                  Patience& patience) {
  return make_child("ncclCommSplit", config, shares_with_split_, patience,
                    [&](ncclComm_t parent, ncclComm_t* child) {
                      return ncclCommSplit(parent, color, key, child, &config);
                    });
}

std::shared_ptr<Communicator> Communicator::shrink(std::vector<int> excluded, int flags, ncclConfig_t config,
                                                   Patience& patience) {
  require(ncclCommShrink, "ncclCommShrink", "2.27");
  const bool is_aborting = (flags & NCCL_SHRINK_ABORT) != 0;
  return make_child("ncclCommShrink", config, shares_with_shrunk_ && !is_aborting, patience,
                    [&](ncclComm_t parent, ncclComm_t* child) {
                      if (is_aborting) stop_family();
                      return ncclCommShrink(parent, excluded.data(), static_cast<int>(excluded.size()), child,
                                            &config, flags);
                    });
}

std::shared_ptr<Communicator> Communicator::grow(int world_size, const ncclUniqueId* id, ncclConfig_t config,
                                                 Patience& patience) {
  require(ncclCommGrow, "ncclCommGrow", "2.29.2");
  return make_child("ncclCommGrow", config, false, patience, [&](ncclComm_t parent, ncclComm_t* child) {
    return ncclCommGrow(parent, world_size, id, -1, child, &config);
  });
}

ncclUniqueId Communicator::unique_id(Patience& patience) {
  require(ncclCommGetUniqueId, "ncclCommGetUniqueId", "2.29.2");
  ncclUniqueId id;
  Turn turn(*this, "ncclCommGetUniqueId", patience);
  turn.settle(ncclCommGetUniqueId(handle(), &id));
  return id;
}

void Communicator::complete(ncclResult_t result, const char* function, Patience& patience) {
  adopt_newborn();
  if (handle() == nullptr) throw error_of(function, result, nullptr);  // refused before it began
  try {
    Turn turn(*this, function, patience);
    // The exit ends it from here on. No sooner: the watchdog would find the error that this call is to tell.
    Watchdog::instance().watch(shared_from_this());
    turn.settle(begun(result));
    turn.settle(ncclCommUserRank(handle(), &rank_));
    turn.settle(ncclCommCount(handle(), &world_size_));
  } catch (const Error& error) {
    fail(error);
    Reaper::instance().end(shared_from_this());
    throw;
  }
}

void Communicator::adopt_newborn() noexcept {
  if (newborn_ != nullptr) handle_.store(std::exchange(newborn_, nullptr), std::memory_order_release);
}

// --- Calls

void Communicator::launch(const Operation& operation, Patience& patience) {
  check_available(operation.op);
  Turn turn(*this, function_of(operation.op), patience);
  check_in_service(function_of(operation.op));
  turn.settle(issue_now(operation));
}

ncclResult_t Communicator::issue_now(const Operation& operation) {
  std::optional<DeviceGuard> guard;
  if (needs_current_device()) guard.emplace(cuda_, device_);
  return issue_on(operation, operation.stream);
}

void* Communicator::register_buffer(void* data, std::size_t nbytes, Patience& patience) {
  void* registration = nullptr;
  const ContextGuard guard(cuda_, device_);
  const RelaxedCapture relaxed(cuda_);
  Turn turn(*this, "ncclCommRegister", patience);
  turn.settle(ncclCommRegister(handle(), data, nbytes, &registration));
  return registration;
}

void Communicator::deregister_buffer(void* registration, Patience& patience) {
  const DeviceGuard guard(cuda_, device_);  // it may leave another device current
  const RelaxedCapture relaxed(cuda_);      // and takes back memory that it has mapped
  Turn turn(*this, "ncclCommDeregister", patience);
  turn.settle(ncclCommDeregister(handle(), registration));
}

ncclWindow_t Communicator::register_window(void* data, std::size_t nbytes, int flags, Patience& patience) {
  require(ncclCommWindowRegister, "ncclCommWindowRegister", "2.27");
  // Not on the stack: NCCL's own thread writes it, perhaps after this call has given up.
  auto window = std::make_unique<ncclWindow_t>();
  Turn turn(*this, "ncclCommWindowRegister", patience);
  try {
    turn.settle(begun(ncclCommWindowRegister(handle(), data, nbytes, window.get(), flags)));
  } catch (...) {
    window.release();
    throw;
  }
  return *window;
}

void Communicator::deregister_window(ncclWindow_t window, Patience& patience) {
  require(ncclCommWindowDeregister, "ncclCommWindowDeregister", "2.27");
  const DeviceGuard guard(cuda_, device_);
  const RelaxedCapture relaxed(cuda_);
  Turn turn(*this, "ncclCommWindowDeregister", patience);
  turn.settle(ncclCommWindowDeregister(handle(), window));
}

ncclRedOp_t Communicator::create_premul_sum(void* scalar, ncclDataType_t dtype,
                                            ncclScalarResidence_t residence, Patience& patience) {
  ncclRedOp_t reduce_op = ncclSum;
  Turn turn(*this, "ncclRedOpCreatePreMulSum", patience);
  turn.settle(ncclRedOpCreatePreMulSum(&reduce_op, scalar, dtype, residence, handle()));
  return reduce_op;
}

void Communicator::destroy_reduce_op(ncclRedOp_t reduce_op, Patience& patience) {
  Turn turn(*this, "ncclRedOpDestroy", patience);
  turn.settle(ncclRedOpDestroy(reduce_op, handle()));
}

void Communicator::deregister_later(void* registration, bool (*let_go)(void*), void* memory) noexcept {
  Reaper::instance().run(
      [self = shared_from_this(), registration, let_go, memory, is_back = false]() mutable {
        is_back = is_back || give_back_quietly(*self, [&](Patience& patience) {
                    self->deregister_buffer(registration, patience);
                  });
        // At the exit nobody may be left to take it, and all of it goes with the process.
        return is_back && (let_go(memory) || Reaper::instance().is_stopping());
      });
}

void Communicator::let_go_once_ended(bool (*let_go)(void*), void* memory) noexcept {
  Reaper::instance().run([self = shared_from_this(), let_go, memory] {
    return self->is_ended() && (let_go(memory) || Reaper::instance().is_stopping());
  });
}

void Communicator::destroy_reduce_op_later(ncclRedOp_t reduce_op) noexcept {
  Reaper::instance().run([self = shared_from_this(), reduce_op] {
    return give_back_quietly(*self,
                             [&](Patience& patience) { self->destroy_reduce_op(reduce_op, patience); });
  });
}

void Communicator::suspend(Patience& patience) {
  require(ncclCommSuspend, "ncclCommSuspend", "2.29.7");
  Turn turn(*this, "ncclCommSuspend", patience);
  check_in_service("ncclCommSuspend");
  turn.settle(ncclCommSuspend(handle(), NCCL_SUSPEND_MEM));
  is_suspended_ = true;
}

void Communicator::resume(Patience& patience) {
  require(ncclCommResume, "ncclCommResume", "2.29.7");
  Turn turn(*this, "ncclCommResume", patience);
  if (!is_suspended_) throw misused("ncclCommResume", "the communicator is not suspended");
  turn.settle(ncclCommResume(handle()));
  is_suspended_ = false;
}

std::uint64_t Communicator::memory(ncclCommMemStat_t statistic, Patience& patience) {
  require(ncclCommMemStats, "ncclCommMemStats", "2.29.7");
  std::uint64_t value = 0;
  Turn turn(*this, "ncclCommMemStats", patience);
  turn.settle(ncclCommMemStats(handle(), statistic, &value));
  return value;
}

ncclResult_t Communicator::async_error(Patience& patience) {
  if (num_forks_ != num_forks()) throw ended(ErrorKind::forked);
  const Lock lock = lock_patiently(lock_, "ncclCommGetAsyncError", patience);
  check_open();
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = ncclCommGetAsyncError(handle(), &state);
  return result == ncclSuccess ? state : result;
}

// --- Its health

void Communicator::check_open() const {
  if (num_forks_ != num_forks()) throw ended(ErrorKind::forked);
  // Read before the error: one that ends the communicator is there before its end begins, and tells more.
  const bool is_aborting = is_aborting_.load(std::memory_order_acquire);
  const bool is_closing = is_closing_.load(std::memory_order_acquire);
  first_error_.check();
  if (is_aborting) throw ended(ErrorKind::aborted);
  if (is_closing) throw ended(ErrorKind::closed);
}

void Communicator::check_in_service(const char* function) const {
  if (is_suspended_) throw misused(function, "the communicator is suspended: resume it first");
  check_not_finalized(function);
}

void Communicator::check_not_finalized(const char* function) const {
  if (is_finalized_) throw misused(function, "the communicator was finalized: only its end can follow");
}

bool Communicator::try_fail(const Error& error) noexcept {
  const bool is_ending = is_closing_.load(std::memory_order_acquire) || is_aborted();
  return first_error_.try_keep(error, !is_ending);
}

bool Communicator::discover_error(bool is_patient) noexcept {
  Lock lock = lock_within(is_patient ? kCallGrace : std::chrono::seconds(0), lock_);
  if (!lock.owns_lock()) return false;  // of what is inside NCCL, the call itself learns
  if (handle() == nullptr || is_busy() || is_closing_ || has_failed()) return false;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = ncclCommGetAsyncError(handle(), &state);
  if (result != ncclSuccess) state = result;
  if (state == ncclSuccess || state == ncclInProgress) return false;
  const Error error = error_of("ncclCommGetAsyncError", state, handle());
  lock.unlock();
  return try_fail(error);
}

// --- Its end

void Communicator::finalize(Patience& patience) {
  const DeviceGuard guard(cuda_, device_);
  Turn turn(*this, "ncclCommFinalize", patience);
  if (is_finalized_) return;
  if (is_revoked_)
    throw misused("ncclCommFinalize", "the communicator was revoked, which has ended its work");
  turn.settle(ncclCommFinalize(handle()));
  is_finalized_ = true;
}

void Communicator::revoke(Patience& patience) {
  require(ncclCommRevoke, "ncclCommRevoke", "2.28.7");
  Turn turn(*this, "ncclCommRevoke", patience);
  if (is_revoked_) return;
  check_not_finalized("ncclCommRevoke");
  is_revoked_ = true;
  stop_family();
  turn.settle(ncclCommRevoke(handle(), NCCL_REVOKE_DEFAULT));
}

void Communicator::abort() noexcept {
  is_aborting_.store(true, std::memory_order_release);
  Reaper::instance().end(shared_from_this());
}

void Communicator::abort_now() noexcept {
  is_aborting_.store(true, std::memory_order_release);
  for (const auto& other : stop_family()) Reaper::instance().end(other);
  Lock lock = lock_within(kCallGrace, lock_);
  const ncclComm_t aborted = handle_.exchange(nullptr, std::memory_order_acq_rel);
  std::vector<std::shared_ptr<Communicator>> children;
  if (lock.owns_lock()) {
    children.swap(unfinished_);
    lock.unlock();
  }
  // A child that grows has its handle from the start, and uses its parent's connections; others get theirs
  // once the parent has let go of them.
  for (const auto& child : children) {
    if (child->handle() == nullptr) continue;
    revoke_quietly(aborted);
    child->abort_now();
  }
  if (aborted != nullptr) ncclCommAbort(aborted);
  for (const auto& child : children) {
    child->adopt_newborn();
    if (!child->is_ended()) child->abort_now();
  }
  is_ended_.store(true, std::memory_order_release);
}

bool Communicator::advance_end(Patience::Clock::time_point deadline) noexcept {
  if (is_ended()) return true;
  if (has_failed() || is_aborting_) {
    abort_now();
    return true;
  }
  Lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) {
    // Some call of the device's is inside NCCL. If it hangs there, it is not waited for.
    if (Patience::Clock::now() < deadline) return false;
    abort_now();
    return true;
  }
  if (handle() == nullptr) return is_ended_ = true;
  if (is_busy()) {
    // Whoever waits for NCCL in a call on this one leaves now; for another one of the family, it goes first.
    if (Patience::Clock::now() < deadline) return false;
    lock.unlock();
    abort_now();
    return true;
  }
  // The family waits, and other communicators go on: one that blocks waits in NCCL for the other ranks.
  family_->is_busy.store(true, std::memory_order_release);
  lock.unlock();
  const bool is_over = finalize_quietly(handle(), deadline);
  family_->is_busy.store(false, std::memory_order_release);
  if (!is_over) return false;
  if (!is_finalized_) {
    abort_now();
    return true;
  }
  const ncclComm_t finalized = handle_.exchange(nullptr);
  if (finalized != nullptr) ncclCommDestroy(finalized);
  return is_ended_ = true;
}

bool Communicator::finalize_quietly(ncclComm_t comm, Patience::Clock::time_point deadline) noexcept {
  if (is_finalized_) return true;
  ncclResult_t state = ncclSuccess;
  if (ncclCommGetAsyncError(comm, &state) != ncclSuccess) return true;
  if (state == ncclInProgress) return Patience::Clock::now() >= deadline;
  if (state != ncclSuccess) return true;
  is_finalized_ = is_finalizing_ || is_revoked_;  // finalizing what is revoked would be an error
  if (is_finalized_) return true;
  is_finalizing_ = true;
  const ncclResult_t result = ncclCommFinalize(comm);
  return result != ncclSuccess && result != ncclInProgress;
}

}  // namespace ferro::nccl
