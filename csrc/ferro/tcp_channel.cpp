#include "ferro/tcp_channel.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

namespace ferro {
namespace {

constexpr std::size_t kDropNbytes = std::size_t{64} << 10;

// How long a stream's end without last words waits for those of the mesh before the peer counts as dead.
constexpr std::chrono::milliseconds kMeshPatience{500};

Frame header_of(const PointToPoint& op) {
  Frame header;
  header.kind = FrameKind::message;
  header.first.dtype = op.dtype;
  header.first.count = op.count;
  header.first.tag = op.tag;
  header.second.count = op.nbytes();
  return header;
}

// Whether the lengths in a header are ones that a sender can have meant.
bool is_message(const Frame& header) {
  if (header.magic != kFrameMagic || header.kind != FrameKind::message) return false;
  if (static_cast<int>(header.first.dtype) >= kDTypeCount) return false;
  const std::size_t itemsize = item_size(header.first.dtype);
  return header.first.count <= SIZE_MAX / itemsize && header.second.count == header.first.count * itemsize;
}

}  // namespace

TcpChannel::TcpChannel(int peer, int fd, std::shared_ptr<TcpMesh> mesh)
    : stream_(peer, UniqueFd(fd)), mesh_(std::move(mesh)) {}

TcpChannel::~TcpChannel() {
  close(false);
  stream_.discard_unread();
}

bool TcpChannel::discard_unread() noexcept { return stream_.discard_unread() && stream_.has_undelivered(); }

void TcpChannel::close(bool is_superseded) noexcept {
  if (is_closed_) return;
  is_closed_ = true;
  if (!is_superseded) say_goodbye();
  stream_.shut_down();
}

void TcpChannel::say_goodbye() noexcept {
  Frame words = farewell(FrameKind::goodbye);
  const iovec piece{&words, sizeof words};
  try {
    // If there is no room, the peer has not been reading. It will find only the end of the stream, and
    // learn from the mesh that this was a goodbye: close() waits for nobody.
    stream_.send(&piece, 1);
  } catch (const Error&) {
    // The socket is unusable: the peer will notice, too.
  }
}

bool TcpChannel::has_peer_left() { return stream_.has_hung_up() && stream_.last_words().has_value(); }

bool TcpChannel::try_send(Message& message) {
  if (!message.is_started) {
    outgoing_ = header_of(message.op);
    outgoing_nbytes_ = 0;
    message.is_started = true;
  }
  const std::size_t nbytes = message.op.nbytes(), end = message.end_of_turn(nbytes);
  while (outgoing_nbytes_ < sizeof outgoing_ || message.done < end) {
    const std::size_t header_left = sizeof outgoing_ - outgoing_nbytes_;
    const iovec pieces[2] = {{reinterpret_cast<char*>(&outgoing_) + outgoing_nbytes_, header_left},
                             {static_cast<char*>(message.op.data) + message.done, end - message.done}};
    const TcpStream::Moved moved = header_left > 0 ? stream_.send(pieces, 2) : stream_.send(pieces + 1, 1);
    if (moved.has_ended) throw_if_certain();
    if (moved.nbytes == 0) return false;
    const std::size_t of_header = std::min(header_left, moved.nbytes);
    outgoing_nbytes_ += of_header;
    message.done += moved.nbytes - of_header;
  }
  return message.done == nbytes;
}

bool TcpChannel::try_recv(Message& message) {
  if (!message.is_started && !try_recv_header(message)) return false;
  for (const std::size_t end = message.end_of_turn(message.incoming_nbytes); message.done < end;) {
    const std::size_t wanted =
        message.is_discarding ? std::min(end - message.done, kDropNbytes) : end - message.done;
    char* const place = message.is_discarding ? dropped_.reserve(kDropNbytes)
                                              : static_cast<char*>(message.op.data) + message.done;
    const TcpStream::Moved moved = stream_.receive(place, wanted);
    if (moved.has_ended) throw_if_certain();
    if (moved.nbytes == 0) return false;
    message.done += moved.nbytes;
  }
  if (message.done < message.incoming_nbytes) return false;
  if (stream_.farewell_inside()) {
    throw_if_certain();
    return false;
  }
  if (message.is_discarding) throw Error(ErrorCode::size_mismatch, stream_.peer(), message.mismatch);
  return true;
}

bool TcpChannel::try_recv_header(Message& message) {
  while (stream_.buffered_nbytes() < sizeof(Frame)) {
    const TcpStream::Moved moved = stream_.fill(kMaxFrameNbytes);
    if (moved.has_ended) throw_if_certain();
    if (moved.nbytes == 0) return false;
  }
  Frame header;
  std::memcpy(&header, stream_.buffered(), sizeof header);
  if (is_farewell(header) || (!is_message(header) && stream_.farewell_inside(sizeof header))) {
    throw_if_certain();
    return false;
  }
  begin_payload(message, header);
  stream_.consume(sizeof header);
  return true;
}

void TcpChannel::begin_payload(Message& message, const Frame& header) {
  if (!is_message(header))
    throw Error(ErrorCode::io, stream_.peer(), "bytes that are no message of this protocol version");
  message.is_started = true;
  message.incoming_nbytes = header.second.count;
  message.check_fits(header.first.dtype, header.first.count, header.first.tag, stream_.peer());
}

// The stream has ended. Throws the reason; returns if that will only be known in a moment.
void TcpChannel::throw_if_certain() {
  if (mesh_ != nullptr) {
    const AbortReason reason = mesh_->look();
    if (reason.is_set()) throw mesh_->error_of(reason);
  }
  const bool has_left = stream_.last_words() || (mesh_ != nullptr && mesh_->has_said_goodbye(stream_.peer()));
  if (has_left) throw Error(ErrorCode::channel_closed, stream_.peer());
  if (!may_mesh_tell_more())
    throw Error(stream_.is_cut() ? ErrorCode::unreachable : ErrorCode::peer_lost, stream_.peer());
}

// Both sockets of a peer end together, whether it left or died, but the news of one may
// overtake the other's.
bool TcpChannel::may_mesh_tell_more() {
  if (mesh_ == nullptr) return false;
  const auto now = Clock::now();
  if (!ended_at_) ended_at_ = now;
  return now - *ended_at_ < kMeshPatience;
}

}  // namespace ferro
