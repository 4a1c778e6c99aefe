#include "ferro/messenger.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace ferro {
namespace {

// Where some peers are reached through memory and others through sockets, no one
// system call waits for both: the sockets are polled, the memory looked at this often.
constexpr int kMixedPollMs = 1;

}  // namespace

Messenger::Messenger(const Transport& transport, std::vector<std::unique_ptr<Channel>> channels,
                     std::shared_ptr<Segment> segment, int index, SpinPolicy spin)
    : transport_(transport),
      channels_(std::move(channels)),
      segment_(std::move(segment)),
      index_(index),
      spin_(spin),
      lanes_(2 * channels_.size()) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].channel = channels_[i / 2].get();
    lanes_[i].peer = static_cast<int>(i / 2);
    lanes_[i].is_outgoing = i % 2 == 1;
    has_sockets_ |= lanes_[i].channel != nullptr && lanes_[i].channel->poll_fd() >= 0;
  }
  if (!has_sockets_) return;
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_fd_ < 0) throw Error(ErrorCode::io, -1, "eventfd failed");
}

Messenger::~Messenger() {
  if (event_fd_ >= 0) ::close(event_fd_);
}

void Messenger::post(Batch& batch) {
  for (Message& message : batch.messages_) {
    Lane& lane = lanes_[2 * message.op.peer + (message.op.is_send ? 1 : 0)];
    if (lane.messages.empty()) lanes_in_use_.push_back(&lane);
    lane.messages.emplace_back(&message, &batch);
  }
}

bool Messenger::progress() {
  bool has_moved = false;
  for (std::size_t i = 0; i < lanes_in_use_.size();) {
    has_moved |= progress(*lanes_in_use_[i]);
    if (lanes_in_use_[i]->messages.empty()) {
      lanes_in_use_[i] = lanes_in_use_.back();
      lanes_in_use_.pop_back();
    } else {
      ++i;
    }
  }
  return has_moved;
}

bool Messenger::progress(Lane& lane) {
  bool has_moved = false;
  while (!lane.messages.empty()) {
    auto& [message, batch] = lane.messages.front();
    const std::size_t done_before = message->done;
    const bool was_started = message->is_started;
    bool is_complete;
    try {
      is_complete = lane.is_outgoing ? lane.channel->try_send(*message) : lane.channel->try_recv(*message);
    } catch (const Error& error) {
      if (error.code != ErrorCode::size_mismatch) {
        check_group();  // a peer that left because the group had ended is not to blame
        throw;
      }
      if (batch->error_ == nullptr) batch->error_ = std::make_unique<Error>(error);
      is_complete = true;
    }
    has_moved |= is_complete || message->done != done_before || message->is_started != was_started;
    if (!is_complete) break;
    --batch->remaining_;
    lane.messages.pop_front();
  }
  return has_moved;
}

void Messenger::clear() {
  for (Lane* lane : lanes_in_use_) lane->messages.clear();
  lanes_in_use_.clear();
}

void Messenger::close() noexcept {
  for (const std::unique_ptr<Channel>& channel : channels_)
    if (channel != nullptr) channel->close();
}

void Messenger::check_group() const {
  const AbortReason reason = transport_.aborted();
  if (reason.code != ErrorCode::none) throw Error(reason.code, reason.culprit);
}

void Messenger::run(Call& call, Batch& batch) {
  check_group();
  post(batch);
  try {
    progress();
    for (int i = 0; i < SpinPolicy::kBriefPauses && !batch.is_done(); ++i) {
      pause_briefly();
      progress();
    }
    if (!batch.is_done()) call.begin_blocking();
    for (int idle = 0; !batch.is_done();) {
      idle = progress() ? 0 : idle + 1;
      if (idle == 0) continue;
      if (idle < spin_.pauses) {
        pause_briefly();
      } else if (idle < spin_.pauses + spin_.yields) {
        sched_yield();
      } else {
        check_group();
        call.check_interrupt();
        if (call.is_expired()) throw_timeout();
        sleep();
      }
    }
  } catch (const Error&) {
    clear();
    throw;
  }
  batch.rethrow();
}

void Messenger::throw_timeout() const {
  Error error(ErrorCode::timeout);
  for (const Lane* lane : lanes_in_use_) error.missing.push_back(lane->peer);
  std::sort(error.missing.begin(), error.missing.end());
  error.missing.erase(std::unique(error.missing.begin(), error.missing.end()), error.missing.end());
  if (!error.missing.empty()) error.peer = error.missing.front();
  throw error;
}

void Messenger::sleep() {
  if (!has_sockets_) {
    std::atomic<std::uint32_t>& word = segment_->message_sleeper(index_);
    word.store(kAnyPeer, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // What moves now was published before the word could be seen.
    if (!is_notified_.exchange(false, std::memory_order_seq_cst) && !progress() &&
        transport_.aborted().code == ErrorCode::none)
      futex_wait(word, kAnyPeer, std::chrono::duration<double>(kWaitSlice).count());
    word.store(kAwake, std::memory_order_relaxed);
    return;
  }
  std::vector<pollfd> entries{{event_fd_, POLLIN, 0}};
  bool has_memory = false;
  for (const Lane* lane : lanes_in_use_) {
    const int fd = lane->channel->poll_fd();
    has_memory |= fd < 0;
    if (fd >= 0) entries.push_back({fd, static_cast<short>(lane->is_outgoing ? POLLOUT : POLLIN), 0});
  }
  poll(entries.data(), entries.size(), has_memory ? kMixedPollMs : static_cast<int>(kWaitSlice.count()));
  if (entries.front().revents != 0) {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t drained = read(event_fd_, &count, sizeof count);
  }
}

void Messenger::notify() {
  if (event_fd_ >= 0) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_fd_, &one, sizeof one);
  } else {
    is_notified_.store(true, std::memory_order_seq_cst);
    unpark(segment_->message_sleeper(index_));
  }
}

}  // namespace ferro
