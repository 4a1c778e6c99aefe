#include "ferro/exchange.hpp"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "ferro/parking.hpp"
#include "ferro/testimony.hpp"

namespace ferro {
namespace {

// How long a rank with a core of its own looks before it sleeps: a few round
// trips of a fast network. Waking from poll() alone costs as much.
constexpr std::chrono::microseconds kSpin{40};
// The clock is read once in this many turns of streams in which something moved.
constexpr std::size_t kTurnsPerCheck = 16;
// Pieces that one system call gathers: a header, its payload, and what follows.
constexpr int kMaxPieces = 4;

}  // namespace

Exchange::Exchange(TcpMesh& mesh, Call& call) : mesh_(mesh), call_(call) { call.begin_blocking(); }

Exchange::~Exchange() {
  // What an error left queued must not be taken for part of the next exchange.
  for (Lane* lane : mesh_.active_) {
    lane->sends.clear();
    lane->receives.clear();
    lane->num_sent = lane->num_received = 0;
    lane->is_active = false;
    release_frame(*lane);
  }
  mesh_.active_.clear();
}

Exchange::Lane& Exchange::activate(int peer) {
  Lane& lane = mesh_.lane(peer);
  if (!lane.is_active) {
    lane.is_active = true;
    mesh_.active_.push_back(&lane);
  }
  return lane;
}

void Exchange::send(int peer, const void* data, std::size_t nbytes) {
  if (nbytes == 0) return;
  activate(peer).sends.push({static_cast<char*>(const_cast<void*>(data)), nbytes, false});
  ++num_pending_;
}

void Exchange::receive(int peer, void* data, std::size_t nbytes) {
  if (nbytes == 0) return;
  Lane& lane = activate(peer);
  release_frame(lane);
  lane.receives.push({static_cast<char*>(data), nbytes, false});
  ++num_pending_;
}

void Exchange::send_frame(int peer, const Frame& frame, const void* payload) {
  Lane& lane = activate(peer);
  lane.outgoing = frame;
  lane.sends.push({reinterpret_cast<char*>(&lane.outgoing), sizeof frame, true});
  ++num_pending_;
  send(peer, payload, frame.payload_nbytes);
}

void Exchange::receive_frame(int peer, std::size_t payload_nbytes) {
  Lane& lane = activate(peer);
  release_frame(lane);
  lane.receives.push({nullptr, sizeof(Frame) + payload_nbytes, true});
  ++num_pending_;
}

Frame Exchange::frame(int peer) const {
  Frame frame;
  std::memcpy(&frame, mesh_.lane(peer).stream.buffered(), sizeof frame);
  return frame;
}

const void* Exchange::payload(int peer) const { return mesh_.lane(peer).stream.buffered() + sizeof(Frame); }

void Exchange::release_frame(Lane& lane) {
  lane.stream.consume(lane.frame_nbytes);
  lane.frame_nbytes = 0;
}

void Exchange::wait() {
  try {
    await_progress();
  } catch (const Error&) {
    note_awaited();
    throw;
  }
}

void Exchange::await_progress() {
  if (progress() || (mesh_.may_spin() && spin())) {
    num_turns_ += mesh_.active_.size();
    if (num_turns_ < kTurnsPerCheck) return;
    num_turns_ = 0;
    return check_caller(false);
  }
  do sleep();
  while (!progress());
}

bool Exchange::spin() {
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    pause_briefly();
    if (progress()) return true;
  } while (Clock::now() < end);
  return false;
}

// One attempt at everything that is queued. True if anything moved.
bool Exchange::progress() {
  const std::lock_guard<std::mutex> lock(mesh_.streams_mutex_);
  mesh_.throw_if_aborted();
  bool has_moved = false;
  // Sends first: a small message is on its way before we look for others'.
  for (Lane* lane : mesh_.active_)
    if (!lane->sends.empty()) has_moved |= send_some(*lane);
  for (Lane* lane : mesh_.active_)
    if (!lane->receives.empty()) has_moved |= receive_some(*lane);
  return has_moved;
}

bool Exchange::send_some(Lane& lane) {
  iovec pieces[kMaxPieces];
  int num_pieces = 0;
  std::size_t room = kCallNbytes;
  for (std::size_t i = 0; i < lane.sends.size() && num_pieces < kMaxPieces && room > 0; ++i) {
    const std::size_t nbytes = std::min(lane.sends[i].nbytes, room);
    pieces[num_pieces++] = {lane.sends[i].data, nbytes};
    room -= nbytes;
  }
  const TcpStream::Moved moved = lane.stream.send(pieces, num_pieces);
  if (moved.has_ended || lane.said_goodbye) throw mesh_.verdict_on(lane);
  for (std::size_t left = moved.nbytes; left > 0;) {
    TcpMesh::Transfer& transfer = lane.sends.front();
    const std::size_t nbytes = std::min(left, transfer.nbytes);
    transfer.data += nbytes;
    transfer.nbytes -= nbytes;
    left -= nbytes;
    if (!transfer.is_frame) lane.num_sent += nbytes;
    if (transfer.nbytes > 0) break;
    lane.sends.pop();
    --num_pending_;
  }
  return moved.nbytes > 0;
}

bool Exchange::receive_some(Lane& lane) {
  bool has_moved = false;
  for (std::size_t room = kCallNbytes; room > 0 && !lane.receives.empty();) {
    if (lane.receives.front().is_frame) return receive_frame_some(lane) || has_moved;
    TcpMesh::Transfer& transfer = lane.receives.front();
    const std::size_t wanted = std::min(transfer.nbytes, room);
    const TcpStream::Moved moved = lane.stream.receive(transfer.data, wanted);
    if (moved.has_ended) throw mesh_.verdict_on(lane);
    if (moved.nbytes == 0) break;
    has_moved = true;
    transfer.data += moved.nbytes;
    transfer.nbytes -= moved.nbytes;
    lane.num_received += moved.nbytes;
    room -= moved.nbytes;
    if (transfer.nbytes > 0 && lane.stream.buffered_nbytes() == 0 && moved.nbytes < wanted) break;
    if (transfer.nbytes > 0) continue;
    lane.receives.pop();
    --num_pending_;
    if (const auto farewell = lane.stream.farewell_inside()) throw mesh_.verdict_of(lane, *farewell);
  }
  return has_moved;
}

bool Exchange::receive_frame_some(Lane& lane) {
  bool has_moved = false;
  for (std::size_t wanted = lane.receives.front().nbytes;;) {
    if (lane.stream.buffered_nbytes() >= sizeof(Frame)) {
      Frame frame;
      std::memcpy(&frame, lane.stream.buffered(), sizeof frame);
      check_frame(lane, frame);
      wanted = sizeof frame + frame.payload_nbytes;
      if (lane.stream.buffered_nbytes() >= wanted) {
        if (const auto farewell = lane.stream.farewell_inside(wanted))
          throw mesh_.verdict_of(lane, *farewell);
        lane.frame_nbytes = wanted;
        lane.receives.pop();
        --num_pending_;
        return true;
      }
    }
    const TcpStream::Moved moved = lane.stream.fill(wanted);
    if (moved.has_ended) throw mesh_.verdict_on(lane);
    if (moved.nbytes == 0) return has_moved;
    has_moved = true;
  }
}

void Exchange::check_frame(Lane& lane, const Frame& frame) {
  if (is_farewell(frame)) throw mesh_.verdict_of(lane, frame);
  if (frame.magic == kFrameMagic && frame.kind == FrameKind::collective &&
      frame.payload_nbytes <= kMaxInlineNbytes && frame.state <= Agreement::State::unpaired &&
      static_cast<int>(frame.first.dtype) < kDTypeCount)
    return;
  if (const auto farewell = lane.stream.farewell_inside(sizeof frame))
    throw mesh_.verdict_of(lane, *farewell);
  throw Error(ErrorCode::io, lane.stream.peer(), "bytes that are no frame of this protocol version");
}

void Exchange::sleep() {
  check_caller(false);
  list_poll_entries();
  std::vector<pollfd>& entries = mesh_.poll_entries_;
  // The first sleep is a short one: after it, this rank notes for whom it waits.
  const double longest_s = call_.elapsed_s() < kPresenceSeconds ? 2 * kPresenceSeconds : kWaitSliceSeconds;
  const double timeout_s = std::min(longest_s, call_.slice_s());
  const int num_ready = poll(entries.data(), entries.size(), static_cast<int>(timeout_s * 1e3) + 1);
  if (num_ready <= 0) {
    note_awaited();
    mesh_.look();  // a host that does not answer ends no stream
    return check_caller(num_ready < 0 && errno == EINTR);
  }
  const bool has_hangup = std::any_of(entries.begin(), entries.end(), [](const pollfd& entry) {
    return (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
  });
  if (!has_hangup) return;
  note_awaited();
  const std::lock_guard<std::mutex> lock(mesh_.streams_mutex_);
  mesh_.examine_hangups();
}

// With the lock, since another thread of this rank may be coming across a goodbye.
void Exchange::list_poll_entries() {
  const std::lock_guard<std::mutex> lock(mesh_.streams_mutex_);
  mesh_.poll_entries_.clear();
  for (Lane& lane : mesh_.lanes_) {
    short events = lane.said_goodbye ? 0 : POLLRDHUP;
    if (!lane.sends.empty()) events |= POLLOUT;
    if (!lane.receives.empty()) events |= POLLIN;
    // poll() reports a hang-up even if not asked: a peer that left in order, and
    // of whom nothing is expected, must not be listed at all.
    if (events != 0) mesh_.poll_entries_.push_back({lane.stream.fd(), events, 0});
  }
  mesh_.poll_entries_.push_back({mesh_.wake_fd_.get(), POLLIN, 0});
}

// Lets signals and the deadline end the call.
void Exchange::check_caller(bool was_signalled) {
  was_signalled ? call_.check_interrupt() : call_.check_interrupt_if_due();
  if (call_.is_expired()) throw timeout_error();
}

// For what this rank testifies, should the group end now.
void Exchange::note_awaited() {
  if (call_.elapsed_s() < kPresenceSeconds) return;
  mesh_.note_awaited_in_collective(call_.present_s() < kPresenceSeconds ? RankSet{} : mesh_.awaited());
}

Error Exchange::timeout_error() const {
  Error error(ErrorCode::timeout);
  name_missing(error, mesh_.awaited());
  error.elapsed_s = call_.elapsed_s();
  return error;
}

}  // namespace ferro
