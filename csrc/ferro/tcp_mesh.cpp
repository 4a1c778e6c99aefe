#include "ferro/tcp_mesh.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace ferro {
namespace {

using Clock = std::chrono::steady_clock;

// How often aborted() looks at the sockets.
constexpr std::int64_t kLookIntervalNs = 10'000'000;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

std::vector<UniqueFd> take_over(const std::vector<TcpMesh::Socket>& sockets) {
  std::vector<UniqueFd> fds;
  fds.reserve(sockets.size());
  for (const TcpMesh::Socket& socket : sockets) fds.emplace_back(socket.fd);
  return fds;
}

}  // namespace

TcpMesh::TcpMesh(int own_rank, const std::vector<Socket>& sockets, bool may_spin)
    : own_rank_(own_rank), may_spin_(may_spin) {
  std::vector<UniqueFd> fds = take_over(sockets);
  wake_fd_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_fd_.get() < 0) throw Error(ErrorCode::io, -1, std::string("eventfd: ") + std::strerror(errno));
  lanes_.reserve(sockets.size());
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    const int rank = sockets[i].rank;
    if (rank < 0 || rank >= kMaxWorldSize)
      throw Error(ErrorCode::io, -1, "no such rank: " + std::to_string(rank));
    if (lane_of_.size() <= static_cast<std::size_t>(rank)) lane_of_.resize(rank + 1, -1);
    lane_of_[rank] = static_cast<int>(i);
    lanes_.emplace_back(rank, std::move(fds[i]));
  }
}

TcpMesh::~TcpMesh() {
  close();
  for (Lane& lane : lanes_) lane.stream.discard_unread();
}

void TcpMesh::abort(AbortReason reason) noexcept {
  adopt(reason);
  if (has_told_.exchange(true, std::memory_order_acq_rel)) return;
  const std::uint64_t one = 1;
  if (write(wake_fd_.get(), &one, sizeof one) < 0) return;  // cannot fail: the counter is not full
  {
    const std::lock_guard<std::mutex> pass_in_progress_ends(streams_mutex_);
  }
  const AbortReason winner = this->reason();
  const bool is_close = winner.code == ErrorCode::closed && winner.culprit == own_rank_;
  tell_all(is_close ? farewell(FrameKind::goodbye) : farewell(FrameKind::abort, winner));
}

void TcpMesh::close() noexcept { abort({ErrorCode::closed, own_rank_, own_rank_, sequence()}); }

AbortReason TcpMesh::aborted() noexcept {
  const AbortReason known = reason();
  if (known.code != ErrorCode::none) return known;
  const std::int64_t now = now_ns();
  std::int64_t due = next_look_ns_.load(std::memory_order_relaxed);  // orders nothing, only limits the rate
  if (now < due ||
      !next_look_ns_.compare_exchange_strong(due, now + kLookIntervalNs, std::memory_order_relaxed))
    return known;
  // Whoever holds the lock is looking already.
  const std::unique_lock<std::mutex> lock(streams_mutex_, std::try_to_lock);
  if (lock.owns_lock()) try_examine_hangups();
  return reason();
}

AbortReason TcpMesh::look() noexcept {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  if (reason().code == ErrorCode::none) try_examine_hangups();
  return reason();
}

void TcpMesh::add_lost(std::vector<int>& ranks) noexcept {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  try {
    for (const Lane& lane : lanes_) {
      if (!lane.stream.has_hung_up()) continue;
      const std::optional<Frame> words = lane.stream.last_words();
      if (!words || words->kind == FrameKind::goodbye) ranks.push_back(lane.stream.peer());
    }
  } catch (const std::exception&) {
    // Out of memory while reading last words: the next look may have it.
  }
}

void TcpMesh::try_examine_hangups() noexcept {
  try {
    examine_hangups();
  } catch (const std::exception&) {
    // Out of memory while reading last words: the next look may have it.
  }
}

Error TcpMesh::error_of(AbortReason reason) const {
  if (reason.code == ErrorCode::closed && reason.culprit != own_rank_)
    reason.code = ErrorCode::channel_closed;
  Error error(reason.code, reason.culprit);
  error.sequence = reason.sequence;
  if (reason.code == ErrorCode::timeout && reason.culprit >= 0) error.missing = {reason.culprit};
  if (reason.reporter != own_rank_) error.reporter = reason.reporter;
  return error;
}

AbortReason TcpMesh::reason() const noexcept {
  const std::uint64_t word = word_.load(std::memory_order_acquire);
  return word == 0 ? AbortReason{} : AbortReason::unpack(word);
}

void TcpMesh::adopt(AbortReason reason) noexcept {
  std::uint64_t none = 0;
  // Release: a thread that sees the reason sees what led to it.
  word_.compare_exchange_strong(none, reason.pack(), std::memory_order_acq_rel);
}

void TcpMesh::throw_if_aborted() const {
  const AbortReason known = reason();
  if (known.code != ErrorCode::none) throw error_of(known);
}

void TcpMesh::examine_hangups() {
  int lowest_silent = -1;
  for (Lane& lane : lanes_) {
    if (lane.said_goodbye || !lane.stream.has_hung_up()) continue;
    const std::optional<Frame> words = lane.stream.last_words();
    if (words && words->kind == FrameKind::abort) return adopt(AbortReason::unpack(words->first.count));
    if (words) {
      lane.said_goodbye = true;
    } else if (lowest_silent < 0 || lane.stream.peer() < lowest_silent) {
      lowest_silent = lane.stream.peer();
    }
  }
  // Of several that died together the lowest, as others will find.
  if (lowest_silent >= 0) adopt({ErrorCode::peer_lost, lowest_silent, own_rank_, sequence()});
}

Error TcpMesh::verdict_on(Lane& suspect) {
  examine_hangups();
  const int peer = suspect.stream.peer();
  if (reason().code == ErrorCode::none)
    adopt({suspect.said_goodbye ? ErrorCode::channel_closed : ErrorCode::peer_lost, peer, own_rank_,
           sequence()});
  return error_of(reason());
}

Error TcpMesh::verdict_of(Lane& speaker, const Frame& last_words) {
  speaker.said_goodbye = last_words.kind == FrameKind::goodbye;
  if (!speaker.said_goodbye) adopt(AbortReason::unpack(last_words.first.count));
  return verdict_on(speaker);
}

void TcpMesh::tell_all(const Frame& last_words) noexcept {
  const std::int64_t deadline_ns = now_ns() + static_cast<std::int64_t>(kTellSeconds * 1e9);
  // First to all whose stream has room, then to those who must read first: a peer
  // that reads nothing waits for somebody else, and shall not delay the others' news.
  for (Lane& lane : lanes_) tell(lane, last_words, 0);
  for (Lane& lane : lanes_) {
    tell(lane, last_words, deadline_ns);
    lane.stream.shut_down();
  }
}

void TcpMesh::tell(Lane& lane, const Frame& last_words, std::int64_t deadline_ns) noexcept {
  char bytes[sizeof last_words];
  std::memcpy(bytes, &last_words, sizeof bytes);
  while (lane.told_nbytes < sizeof bytes) {
    const iovec piece{bytes + lane.told_nbytes, sizeof bytes - lane.told_nbytes};
    TcpStream::Moved moved;
    try {
      moved = lane.stream.send(&piece, 1);
    } catch (const Error&) {
      return;
    }
    lane.told_nbytes += moved.nbytes;
    const std::int64_t left_ms = (deadline_ns - now_ns()) / 1'000'000;
    // A peer that has hung up knows of the end, or died.
    if (moved.has_ended || (moved.nbytes == 0 && (left_ms <= 0 || lane.stream.has_hung_up()))) return;
    pollfd entry{lane.stream.fd(), POLLOUT | POLLIN | POLLRDHUP, 0};
    if (moved.nbytes == 0 && poll(&entry, 1, static_cast<int>(left_ms)) <= 0) return;
    // It may be telling us the same: nobody would read, and nobody have room.
    if ((entry.revents & POLLIN) != 0) lane.stream.discard_unread();
  }
}

}  // namespace ferro
