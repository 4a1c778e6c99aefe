#include "ferro/tcp_mesh.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

#include "ferro/clock.hpp"

namespace ferro {
namespace {

// How often aborted() looks at the sockets.
constexpr std::int64_t kLookIntervalNs = 10'000'000;
// How often an inquest looks for the words of ranks to which there is no socket.
constexpr std::int64_t kListenIntervalNs = 10'000'000;

std::vector<UniqueFd> take_over(const std::vector<TcpMesh::Socket>& sockets) {
  std::vector<UniqueFd> fds;
  fds.reserve(sockets.size());
  for (const TcpMesh::Socket& socket : sockets) fds.emplace_back(socket.fd);
  return fds;
}

bool is_of_program(const Call& call) { return !call.is_in_background() && is_main_thread(); }

}  // namespace

TcpMesh::TcpMesh(int own_rank, int world_size, const std::vector<Socket>& sockets, bool may_spin)
    : own_rank_(own_rank), world_size_(world_size), may_spin_(may_spin) {
  std::vector<UniqueFd> fds = take_over(sockets);
  wake_fd_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_fd_.get() < 0) throw_errno("eventfd");
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    const int rank = sockets[i].rank;
    if (rank < 0 || rank >= world_size || world_size > kMaxWorldSize)
      throw Error(ErrorCode::io, -1, "no such rank: " + std::to_string(rank));
    if (lane_of_.size() <= static_cast<std::size_t>(rank)) lane_of_.resize(rank + 1, -1);
    lane_of_[rank] = static_cast<int>(i);
    lanes_.emplace_back(rank, std::move(fds[i]), Testimony::nbytes(world_size));
  }
}

TcpMesh::~TcpMesh() {
  close();
  if (reason().code != ErrorCode::closed) await_delivery();
  for (Lane& lane : lanes_) lane.stream.discard_unread();
}

void TcpMesh::abort(AbortReason reason) noexcept {
  adopt(reason);
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);  // waits for a pass in progress to end
    if (has_told_.exchange(true, std::memory_order_acq_rel)) return;
    told_testimony_ = testimony_now();
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_.get(), &one, sizeof one);
  const AbortReason winner = this->reason();
  const bool is_close = winner.code == ErrorCode::closed && winner.culprit == own_rank_;
  const Frame frame = is_close ? farewell(FrameKind::goodbye) : farewell(FrameKind::abort, winner);
  tell_all(words_of(frame, told_testimony_));
}

void TcpMesh::close() noexcept { abort({ErrorCode::closed, own_rank_, own_rank_, sequence()}); }

AbortReason TcpMesh::aborted() noexcept {
  const AbortReason known = reason();
  if (known.is_set()) return known;
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
  if (!reason().is_set()) try_examine_hangups();
  return reason();
}

bool TcpMesh::has_said_goodbye(int peer) noexcept {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  try_examine_hangups();
  return lane(peer).said_goodbye;
}

void TcpMesh::add_lost(RankSet& ranks) noexcept {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  try {
    for (const Lane& lane : lanes_) {
      if (!lane.stream.has_hung_up()) continue;
      const std::optional<TcpStream::LastWords> words = lane.stream.last_words();
      const bool is_certain = words ? words->frame.kind == FrameKind::goodbye : !lane.stream.is_cut();
      if (is_certain) ranks.set(lane.stream.peer());
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
  if (!this->reason().is_set()) ended_at_ns_.store(now_ns(), std::memory_order_relaxed);
  std::uint64_t none = 0;
  // Release: a thread that sees the reason sees what led to it.
  word_.compare_exchange_strong(none, reason.pack(), std::memory_order_acq_rel);
}

void TcpMesh::throw_if_aborted() const {
  const AbortReason known = reason();
  if (known.is_set()) throw error_of(known);
}

void TcpMesh::examine_hangups() {
  const Lane* lowest_silent = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.said_goodbye || !lane.stream.has_hung_up()) continue;
    const std::optional<TcpStream::LastWords> words = lane.stream.last_words();
    if (words && words->frame.kind == FrameKind::abort)
      return adopt(AbortReason::unpack(words->frame.first.count));
    if (words) {
      lane.said_goodbye = true;
    } else if (lowest_silent == nullptr || lane.stream.peer() < lowest_silent->stream.peer()) {
      lowest_silent = &lane;
    }
  }
  // Of several that died together blame the lowest, as others will.
  if (lowest_silent != nullptr) adopt(end_of(*lowest_silent));
}

AbortReason TcpMesh::end_of(const Lane& lane) const {
  ErrorCode code = lane.stream.is_cut() ? ErrorCode::unreachable : ErrorCode::peer_lost;
  if (lane.said_goodbye) code = ErrorCode::channel_closed;
  return {code, lane.stream.peer(), own_rank_, sequence()};
}

Error TcpMesh::verdict_on(Lane& suspect) {
  examine_hangups();
  if (!reason().is_set()) adopt(end_of(suspect));
  return error_of(reason());
}

Error TcpMesh::verdict_of(Lane& speaker, const Frame& last_words) {
  speaker.said_goodbye = last_words.kind == FrameKind::goodbye;
  if (!speaker.said_goodbye) adopt(AbortReason::unpack(last_words.first.count));
  return verdict_on(speaker);
}

TcpMesh::Words TcpMesh::words_of(const Frame& farewell, const Testimony& testimony) const noexcept {
  Words words{};
  words.nbytes = sizeof farewell + Testimony::nbytes(world_size_);
  std::memcpy(words.bytes, &farewell, sizeof farewell);
  testimony.pack(world_size_, words.bytes + sizeof farewell);
  return words;
}

void TcpMesh::tell_all(const Words& last_words) noexcept {
  const std::int64_t deadline_ns = now_ns() + static_cast<std::int64_t>(kTellSeconds * 1e9);
  // First to all whose stream has room, then to those that must read first: a peer
  // that reads nothing waits for somebody else, and must not delay the news to others.
  // Only the end of a stream lets its peer know that these are last words.
  for (const bool may_wait : {false, true})
    for (Lane& lane : lanes_) {
      tell(lane, last_words, may_wait ? deadline_ns : 0);
      if (lane.told_nbytes == last_words.nbytes || may_wait) lane.stream.shut_down();
    }
}

void TcpMesh::tell(Lane& lane, const Words& last_words, std::int64_t deadline_ns) noexcept {
  while (lane.told_nbytes < last_words.nbytes) {
    const iovec piece{const_cast<char*>(last_words.bytes) + lane.told_nbytes,
                      last_words.nbytes - lane.told_nbytes};
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
    if (moved.nbytes == 0) poll(&entry, 1, static_cast<int>(left_ms));  // may be cut short by a signal
    // It may be trying to tell us the same: if neither read, neither would ever have room.
    if ((entry.revents & POLLIN) != 0) discard_unread(lane);
  }
}

// Of a socket that is closed, what is still on its way is lost as soon as the peer sends anything. After a
// close in good order it sends nothing; of any other end it has yet to hear.
void TcpMesh::await_delivery() noexcept {
  const std::int64_t deadline_ns = now_ns() + static_cast<std::int64_t>(kTellSeconds * 1e9);
  for (Lane& lane : lanes_)
    while (lane.stream.has_undelivered() && !lane.stream.has_hung_up() && now_ns() < deadline_ns) {
      lane.stream.discard_unread();
      poll(nullptr, 0, 1);
    }
}

// Keeps the last words, which others may be looking for.
void TcpMesh::discard_unread(Lane& lane) noexcept {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  lane.stream.discard_unread();
}

// ---- Who is missing ------------------------------------------------------------

RankSet TcpMesh::awaited() const noexcept {
  RankSet senders, receivers;
  for (const Lane& lane : lanes_) {
    const auto rank = static_cast<std::size_t>(lane.stream.peer());
    senders[rank] = lane.receives.is_waiting();
    receivers[rank] = lane.sends.is_waiting();
  }
  return senders.any() ? senders : receivers;
}

void TcpMesh::note_awaited_in_collective(const RankSet& awaited) {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  awaited_in_collective_ = awaited;
  has_awaited_in_collective_.store(awaited.any(), std::memory_order_relaxed);
}

void TcpMesh::clear_awaited_in_collective() {
  if (has_awaited_in_collective_.load(std::memory_order_relaxed)) note_awaited_in_collective({});
}

void TcpMesh::note_waiting_for_collective(const Call& call, bool is_waiting) noexcept {
  if (is_of_program(call)) is_waiting_for_collective_.store(is_waiting, std::memory_order_relaxed);
}

void TcpMesh::note_awaited_in_messages(const Call& call, const RankSet& awaited) noexcept {
  if (!is_of_program(call)) return;
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  if (has_several_callers_) return;
  is_stuck_ = awaited.any();
  awaited_in_messages_ = awaited;
}

void TcpMesh::note_several_callers() noexcept {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  has_several_callers_ = true;
  is_stuck_ = false;
  awaited_in_messages_.reset();
}

// Whoever gives up early has noted nothing: what it sent may be on its way, so it is not stuck.
void TcpMesh::add_to_testimony(const Call& call, const Error& error) noexcept {
  const RankSet awaited = set_of(error.missing);
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  if (!is_message(error.op)) {
    awaited_in_collective_ |= awaited;
    return;
  }
  given_up_ |= awaited;
  if (is_of_program(call) && !has_several_callers_) awaited_in_messages_ |= awaited;
}

Testimony TcpMesh::testimony() {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  return has_told_.load(std::memory_order_relaxed) ? told_testimony_ : testimony_now();
}

Testimony TcpMesh::testimony_now() const noexcept {
  // What was noted may be out of date by up to a slice of the wait.
  const RankSet now = awaited_in_collective_.any() ? awaited() : RankSet{};
  Testimony testimony;
  testimony.in_collective = now.any() ? now : awaited_in_collective_;
  testimony.in_messages = awaited_in_messages_;
  testimony.given_up = given_up_;
  testimony.is_in_collective =
      is_in_collective_.load(std::memory_order_relaxed) || testimony.in_collective.any();
  testimony.waits_for_collective = testimony.is_in_collective && !has_several_callers_ &&
                                   is_waiting_for_collective_.load(std::memory_order_relaxed);
  // Never in a collective: what others have sent in it may be on its way.
  testimony.is_stuck = is_stuck_;
  return testimony;
}

RankSet TcpMesh::find_missing(const std::function<void(Testimonies&)>& add_others) {
  const Testimony own = testimony();
  const std::int64_t deadline_ns =
      ended_at_ns_.load(std::memory_order_relaxed) + static_cast<std::int64_t>(kInquestSeconds * 1e9);
  for (;;) {
    Testimonies testimonies;
    testimonies.add(own_rank_, own);
    add_testimonies(testimonies);
    add_others(testimonies);
    if (testimonies.num_heard() == static_cast<std::size_t>(world_size_) || now_ns() >= deadline_ns)
      return settle(testimonies);
    await_last_words(deadline_ns);
  }
}

// The answer that the first thread to ask has found stands for all: a later one might hear more.
RankSet TcpMesh::settle(const Testimonies& testimonies) {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  if (missing_) return *missing_;
  const AbortReason reason = testimonies.reason();
  word_.store(reason.pack(), std::memory_order_release);
  RankSet missing = testimonies.missing();
  // Everybody is there: a link is slow, they wait for each other in calls of several kinds, or the missing
  // rank came at the last moment.
  if (missing.none() && reason.culprit >= 0) missing.set(reason.culprit);
  missing_ = missing;
  return *missing_;
}

void TcpMesh::add_testimonies(Testimonies& testimonies) {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  if (!reason().is_set()) return;
  testimonies.add(reason());
  for (Lane& lane : lanes_) {
    // Nobody else reads any more, and the peer may have no room for its last words.
    lane.stream.discard_unread();
    if (!lane.stream.has_hung_up()) continue;
    const std::optional<TcpStream::LastWords> words = lane.stream.last_words();
    if (words && words->frame.kind == FrameKind::abort)
      testimonies.add(AbortReason::unpack(words->frame.first.count));
    testimonies.add(lane.stream.peer(),
                    words ? Testimony::unpack(world_size_, words->testimony.data()) : Testimony{});
  }
}

void TcpMesh::await_last_words(std::int64_t deadline_ns) {
  std::vector<pollfd> entries;
  for (const Lane& lane : lanes_)
    if (!lane.stream.has_hung_up()) entries.push_back({lane.stream.fd(), POLLIN | POLLRDHUP, 0});
  const std::int64_t left_ns = std::min(deadline_ns - now_ns(), kListenIntervalNs);
  poll(entries.data(), entries.size(), static_cast<int>(std::max<std::int64_t>(left_ns, 0) / 1'000'000) + 1);
}

}  // namespace ferro
