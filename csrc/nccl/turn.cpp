#include "nccl/turn.hpp"

#include <algorithm>

#include "nccl/library.hpp"
#include "nccl/reaper.hpp"

namespace ferro::nccl {
namespace {

std::vector<std::mutex*> distinct(std::vector<std::mutex*> locks) {
  std::sort(locks.begin(), locks.end());
  locks.erase(std::unique(locks.begin(), locks.end()), locks.end());
  return locks;
}

}  // namespace

Turn::Turn(const std::vector<Communicator*>& communicators, const char* function, Patience& patience)
    : communicator_(communicators.front()),
      others_(communicators.size() > 1 ? communicators : std::vector<Communicator*>{}),
      function_(function),
      patience_(patience) {
  if (!others_.empty()) {
    for (Communicator* each : others_) locks_.push_back(&each->lock_);
    locks_ = distinct(std::move(locks_));
  }
  lock();
}

Turn::~Turn() {
  // Ours alone to reset, with or without the lock.
  if (has_set_busy_) set_busy(false);
  if (is_locked_) unlock();
}

void Turn::lock() {
  check_all();  // before the lock: in a forked child it may be held by a thread that is not there
  for (;;) {
    if (try_lock()) {
      if (!is_any_busy()) break;
      unlock();
    }
    patience_.pause(function_);
    check_all();
  }
  try {
    check_all();  // it may have ended meanwhile
  } catch (...) {
    unlock();
    throw;
  }
}

bool Turn::try_lock() {
  if (others_.empty()) return is_locked_ = communicator_->lock_.try_lock();
  for (std::size_t i = 0; i < locks_.size(); ++i) {
    if (locks_[i]->try_lock()) continue;
    while (i > 0) locks_[--i]->unlock();
    return false;
  }
  return is_locked_ = true;
}

void Turn::unlock() {
  is_locked_ = false;
  if (others_.empty()) return communicator_->lock_.unlock();
  for (std::mutex* each : locks_) each->unlock();
}

bool Turn::is_any_busy() const {
  bool is_busy = false;
  for_each([&](Communicator& each) { is_busy |= each.is_busy(); });
  return is_busy;
}

void Turn::check_all() const {
  for_each([](Communicator& each) { each.check_open(); });
}

void Turn::set_busy(bool busy) {
  has_set_busy_ = busy;
  for_each([=](Communicator& each) { each.family_->is_busy.store(busy, std::memory_order_release); });
}

void Turn::settle_slowly(ncclResult_t result) {
  try {
    if (result == ncclInProgress) result = await_all();
    if (result == ncclSuccess) return;
    throw failure(result);
  } catch (const Error& error) {
    if (error.kind == ErrorKind::nccl && !error.is_fatal) throw;
    end_all(error);
  }
}

void Turn::await_child(Communicator& child) {
  set_busy(true);
  try {
    await(child);
  } catch (const Error& error) {
    end_all(error);
  }
}

ncclResult_t Turn::await_all() {
  set_busy(true);
  ncclResult_t first = ncclSuccess;
  for_each([&](Communicator& each) {
    const ncclResult_t result = await(each);
    if (first == ncclSuccess) first = result;
  });
  return first;
}

// Lets go of the devices between two questions, and comes back with them locked.
ncclResult_t Turn::await(Communicator& communicator) {
  for (;;) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(communicator.handle(), &state);
    if (result != ncclSuccess) return result;
    if (state != ncclInProgress) return state;
    unlock();
    do patience_.pause(function_);
    while (!try_lock());
    check_all();
  }
}

Error Turn::failure(ncclResult_t result) {
  Error error = error_of(function_, result, communicator_->handle());
  // Arguments are refused before anything happens. After any other error nobody knows what the
  // other ranks have launched.
  error.is_fatal = result != ncclInvalidArgument && result != ncclInvalidUsage;
  for_each([&](Communicator& each) {
    ncclResult_t state = ncclSuccess;
    if (each.handle() != nullptr) ncclCommGetAsyncError(each.handle(), &state);
    error.is_fatal |= state != ncclSuccess;  // or in progress, which only abort can end
  });
  return error;
}

// Lets go of the devices while a witness is waited for. The communicators stay busy meanwhile.
void Turn::end_all(const Error& error) {
  if (is_locked_) {
    set_busy(true);
    unlock();
  }
  try {
    while (!try_fail_all(error)) patience_.pause(function_);
  } catch (const Error&) {
    // Time is up, the alarm has come, which the witness hears as well, or a signal handler has raised, of
    // which Python knows by itself.
    try_fail_all(error);
  }
  for_each([&](Communicator& each) {
    each.fail(error);  // unless it has failed
    Reaper::instance().end(each.shared_from_this());
  });
  communicator_->first_error_.check();
  throw error;
}

// Asks all, whatever the first one says: the time for which their witnesses are waited for begins now.
bool Turn::try_fail_all(const Error& error) {
  bool have_failed = true;
  for_each([&](Communicator& each) { have_failed &= each.try_fail(error); });
  return have_failed;
}

}  // namespace ferro::nccl
