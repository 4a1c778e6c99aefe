#include "ferro/messenger.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "ferro/clock.hpp"

namespace ferro {
namespace {

// Where some peers are reached through memory and others through sockets, no single
// system call waits for both: the sockets are polled, and the memory is looked at this often.
constexpr int kMixedPollMs = 1;
constexpr int kSlicePollMs = static_cast<int>(kWaitSliceSeconds * 1e3);

// Receiving this much takes about as long as waking a thread for it. Of a socket, the buffers may hold less.
constexpr std::size_t kLittleNbytes = 256 * 1024;
constexpr std::size_t kLittleOverSocketsNbytes = 16 * 1024;

}  // namespace

Messenger::Messenger(std::shared_ptr<Transport> transport, std::vector<std::unique_ptr<Channel>> channels,
                     std::shared_ptr<Segment> segment, int place, SpinPolicy spin)
    : transport_(std::move(transport)),
      channels_(std::move(channels)),
      segment_(std::move(segment)),
      place_(place),
      spin_(spin),
      lanes_(2 * channels_.size()),
      out_of_memory_(std::make_shared<const Error>(ErrorCode::out_of_memory)) {
  lanes_in_use_.reserve(lanes_.size());
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].channel = channels_[i / 2].get();
    lanes_[i].peer = static_cast<int>(i / 2);
    lanes_[i].is_outgoing = i % 2 == 1;
    has_sockets_ |= lanes_[i].channel != nullptr && lanes_[i].channel->poll_fd() >= 0;
  }
  if (!has_sockets_) return;
  event_fd_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (event_fd_.get() < 0) throw_errno("eventfd");
}

Messenger::~Messenger() {
  close(false);
  discard_rest(channels_);
}

void Messenger::post(Batch& batch) {
  if (end_ != nullptr) return batch.fail(end_);
  try {
    for (Message& message : batch.messages_) {
      Lane& lane = lanes_[2 * message.op.peer + (message.op.is_send ? 1 : 0)];
      if (lane.messages.empty()) {
        lanes_in_use_.push_back(&lane);
        has_unwatched_lane_ = true;
      } else if (lane.is_outgoing) {
        message.is_patient = lane.messages.front().first->is_patient = false;
      }
      lane.messages.emplace_back(&message, &batch);
    }
  } catch (const std::bad_alloc&) {
    withdraw(batch);
    throw;
  }
}

// Takes back the batch that was posted last, nothing of which has moved.
void Messenger::withdraw(const Batch& batch) {
  for (Lane* lane : lanes_in_use_)
    while (!lane->messages.empty() && lane->messages.back().second == &batch) lane->messages.pop_back();
  lanes_in_use_.erase(std::remove_if(lanes_in_use_.begin(), lanes_in_use_.end(),
                                     [](const Lane* lane) { return lane->messages.empty(); }),
                      lanes_in_use_.end());
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
  for (std::size_t nbytes = 0; nbytes < kTurnNbytes && !lane.messages.empty();) {
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
      if (batch->error_ == nullptr) batch->error_ = std::make_shared<const Error>(error);
      is_complete = true;
    }
    nbytes += message->done - done_before;
    has_moved |= is_complete || message->done != done_before || message->is_started != was_started;
    if (!is_complete) break;
    if (--batch->remaining_ == 0 && batch->is_owner_away_) tell_others();
    lane.messages.pop_front();
  }
  return has_moved;
}

void Messenger::end(const Error& why) noexcept {
  std::shared_ptr<const Error> error = out_of_memory_;
  try {
    error = std::make_shared<const Error>(why);
  } catch (const std::bad_alloc&) {
    // Then they are told of that.
  }
  if (end_ == nullptr) end_ = error;
  for (Lane* lane : lanes_in_use_) {
    for (const auto& posted : lane->messages) posted.second->fail(error);
    lane->messages.clear();
  }
  lanes_in_use_.clear();
  tell_others();
}

void Messenger::close(bool is_superseded) noexcept {
  for (const std::unique_ptr<Channel>& channel : channels_)
    if (channel != nullptr) channel->close(is_superseded);
}

void Messenger::add_lost(RankSet& ranks) const {
  for (std::size_t peer = 0; peer < channels_.size(); ++peer)
    if (channels_[peer] != nullptr && channels_[peer]->has_peer_left()) ranks.set(peer);
}

void Messenger::check_group() const { transport_->aborted().throw_if_set(); }

void Messenger::check_caller(const Call& call, const Batch& batch) const {
  check_group();
  if (call.is_expired()) throw_timeout(batch);
}

void Messenger::make_way(Call& call) {
  const Gate::Leave leave(*gate_);
  call.check_interrupt_if_due();
}

// What a sleeping rank lets the others know of whom it awaits: see Transport::note_awaited_in_messages(). Not
// before a slice in which nothing moved, since what it has just sent may be on its way to those that wait for
// it.
class Messenger::WaitNote {
 public:
  WaitNote(const Messenger& messenger, const Call& call) : messenger_(messenger), call_(call) {}

  // To be called when something has moved, and when the wait is over.
  void end_stillness() {
    still_since_.reset();
    if (is_written_) erase();
  }
  // If this rank comes only now, or was stopped, the others may have been waiting for it.
  void erase_if_late() {
    if (is_written_ && call_.present_s() < kPresenceSeconds) erase();
  }
  // To be called before each sleep.
  void renew(const Batch& batch) {
    const Clock::time_point now = Clock::now();
    if (!still_since_) still_since_ = now;
    is_written_ = std::chrono::duration<double>(now - *still_since_).count() >= kWaitSliceSeconds;
    if (is_written_) messenger_.transport_->note_awaited_in_messages(call_, messenger_.peers_due(batch));
  }

 private:
  void erase() {
    is_written_ = false;
    messenger_.transport_->note_awaited_in_messages(call_, {});
  }

  const Messenger& messenger_;
  const Call& call_;
  std::optional<Clock::time_point> still_since_;  // the first sleep since something moved
  bool is_written_ = false;
};

void Messenger::run(Call& call, Batch& batch) {
  std::shared_ptr<Messenger> self;  // while this thread is outside the gate, another may close the group
  try {
    check_group();
    if (!try_briefly(batch)) {
      batch.set_patient(false);
      self = shared_from_this();
      call.begin_blocking();
      move_until_done(call, batch);
    }
  } catch (const std::exception&) {
    end(current_error());
    throw;
  }
  relieve();
  batch.rethrow();
}

// For about a microsecond. True if the batch is done.
bool Messenger::try_briefly(const Batch& batch) {
  progress();
  for (int i = 0; i < SpinPolicy::kBriefPauses && !batch.is_done(); ++i) {
    pause_briefly();
    progress();
  }
  return batch.is_done();
}

bool Messenger::linger(Call* call, Batch& batch) {
  if (try_briefly(batch) || call == nullptr) return batch.is_done();
  batch.set_patient(false);
  call->begin_blocking();
  for (int idle = 1; !batch.is_done() && !gate_->is_awaited() && spin_.linger(idle); ++idle)
    if (progress()) idle = 0;
  return batch.is_done();
}

// Counts what others have posted before it, too: all that is due from one peer must find room in its ring and
// cells. What is left of the batch stands last.
bool Messenger::holds_up_nobody(const Batch& batch) const {
  for (const Lane* lane : lanes_in_use_) {
    if (lane->messages.back().second != &batch) continue;
    if (lane->is_outgoing && lane->channel->is_left_to_peer(*lane->messages.back().first)) continue;
    if (lane->is_outgoing || lane->messages.size() > SegmentLayout::kCells) return false;
    const bool is_over_socket = lane->channel->poll_fd() >= 0;
    const std::size_t room = is_over_socket ? kLittleOverSocketsNbytes
                                            : std::min(kLittleNbytes, segment_->layout().channel_nbytes);
    std::size_t nbytes = 0;
    for (const auto& due : lane->messages) nbytes += due.first->op.nbytes();
    if (nbytes > room) return false;
  }
  return true;
}

bool Messenger::is_sending(const Batch& batch) const {
  for (const Lane* lane : lanes_in_use_)
    for (const auto& posted : lane->messages)
      if (lane->is_outgoing && posted.second == &batch) return true;
  return false;
}

// Moves, spins while nothing moves, and then sleeps until something may.
void Messenger::move_until_done(Call& call, Batch& batch) {
  // A look at a socket takes several times as long as a pause.
  const SpinPolicy patience = spin_.while_moving(has_sockets_ ? 0 : nbytes_of(batch));
  WaitNote note(*this, call);
  unsigned num_passes = 0;
  for (int idle = 0; !batch.is_done();) {
    if (progress()) {
      idle = 0;
      note.end_stillness();
      if (++num_passes % kPassesPerCheck != 0 || batch.is_done()) continue;
      check_caller(call, batch);
      make_way(call);
      continue;
    }
    ++idle;
    // A thread that waits at the gate may have something that can move.
    if (!gate_->is_awaited() && patience.linger(idle)) continue;
    note.erase_if_late();
    check_caller(call, batch);
    // After the check: a rank that comes only when the group has ended has not been waiting.
    note.renew(batch);
    set_owner_away(batch, true);
    sleep(call, news());
    set_owner_away(batch, false);
  }
  note.end_stillness();
}

RankSet Messenger::peers_due(const Batch& batch) const {
  RankSet peers;
  for (const Lane* lane : lanes_in_use_)
    for (const auto& posted : lane->messages)
      if (posted.second == &batch) peers.set(lane->peer);
  return peers;
}

std::vector<int> Messenger::awaited_by(const Batch& batch) const {
  const RankSet peers = peers_due(batch);
  return peers.none() && !batch.is_done() ? peers_of(batch) : ranks_of(peers);
}

std::size_t Messenger::nbytes_of(const Batch& batch) {
  std::size_t nbytes = 0;
  for (const Message& message : batch.messages_) nbytes += message.op.nbytes();
  return nbytes;
}

std::vector<int> Messenger::peers_of(const Batch& batch) {
  RankSet peers;
  for (const Message& message : batch.messages_) peers.set(message.op.peer);
  return ranks_of(peers);
}

void Messenger::throw_timeout(const Batch& batch) const {
  Error error(ErrorCode::timeout);
  error.missing = awaited_by(batch);
  if (!error.missing.empty()) error.peer = error.missing.front();
  throw error;
}

// ---- Sleeping, and waking those who sleep ----------------------------------------

// The time that a thread spends outside the gate. Signal handlers run there: one may close
// the group.
class Messenger::Absence {
 public:
  Absence(Messenger& messenger, bool is_watch) : messenger_(messenger), is_watch_(is_watch) {
    if (is_watch_) {
      messenger_.is_watched_ = true;
    } else {
      messenger_.num_followers_.fetch_add(1, std::memory_order_seq_cst);
    }
    messenger_.gate_->leave();
  }
  ~Absence() {
    Call unhurried(kUnlimited);
    messenger_.gate_->enter(unhurried);
    if (is_watch_) {
      messenger_.is_watched_ = false;
    } else {
      messenger_.num_followers_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  Absence(const Absence&) = delete;
  Absence& operator=(const Absence&) = delete;

 private:
  Messenger& messenger_;
  const bool is_watch_;
};

void Messenger::sleep(Call& call, std::uint32_t heard) {
  const bool is_watch = !is_watched_;
  if (is_watch) {
    if (!begin_watch()) return;
  } else if (has_sockets_ && has_unwatched_lane_) {
    has_unwatched_lane_ = false;
    notify();  // the watch is polling without that lane
    return;
  }
  const Absence absence(*this, is_watch);
  call.check_interrupt();
  is_watch ? watch() : follow(heard);
}

// False if there is a reason not to sleep. Looks once more after the word is set, with the
// gate held: what can move now was published before the word could be seen, and for what other
// threads post from here on they look themselves.
bool Messenger::begin_watch() {
  has_unwatched_lane_ = false;
  if (!has_sockets_) {
    std::atomic<std::uint32_t>& word = segment_->message_sleeper(place_);
    word.store(kAnyPeer, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!is_notified_.exchange(false, std::memory_order_seq_cst) && !progress() &&
        !transport_->aborted().is_set())
      return true;
    word.store(kAwake, std::memory_order_relaxed);
    return false;
  }
  poll_entries_.assign(1, {event_fd_.get(), POLLIN, 0});
  poll_ms_ = kSlicePollMs;
  for (const Lane* lane : lanes_in_use_) {
    const int fd = lane->channel->poll_fd();
    if (fd < 0) poll_ms_ = kMixedPollMs;
    if (fd >= 0) poll_entries_.push_back({fd, static_cast<short>(lane->is_outgoing ? POLLOUT : POLLIN), 0});
  }
  return true;
}

void Messenger::watch() {
  if (!has_sockets_) {
    std::atomic<std::uint32_t>& word = segment_->message_sleeper(place_);
    futex_wait(word, kAnyPeer, kWaitSliceSeconds);
    word.store(kAwake, std::memory_order_relaxed);
    return;
  }
  poll(poll_entries_.data(), poll_entries_.size(), poll_ms_);
  if (poll_entries_.front().revents != 0) {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t drained = read(event_fd_.get(), &count, sizeof count);
  }
}

void Messenger::follow(std::uint32_t heard) { futex_wait(news_, heard, kWaitSliceSeconds); }

void Messenger::notify() {
  call_followers();
  if (event_fd_.get() >= 0) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_fd_.get(), &one, sizeof one);
  } else {
    is_notified_.store(true, std::memory_order_seq_cst);
    unpark(segment_->message_sleeper(place_));
  }
}

// A follower counts itself, then has the kernel compare the news with what it has heard; a
// thread with news changes them, then looks at the count. One of the two sees the other.
void Messenger::call_followers() {
  news_.fetch_add(1, std::memory_order_seq_cst);
  if (num_followers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(news_);
}

void Messenger::tell_others() { is_watched_ ? notify() : call_followers(); }

void Messenger::relieve() {
  if (!is_watched_ && num_followers_.load(std::memory_order_relaxed) != 0) call_followers();
}

}  // namespace ferro
