// A group's point-to-point messages: for each peer an ordered stream each way,
// independent of the group's collectives.
#ifndef FERRO_CHANNEL_HPP
#define FERRO_CHANNEL_HPP

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ferro/error.hpp"
#include "ferro/types.hpp"

namespace ferro {

// About the most that one message moves before others, and the caller's signals, have their turn.
constexpr std::size_t kTurnNbytes = std::size_t{1} << 20;

// One message on its way, moved in pieces, so that many can be under way at once.
struct Message {
  explicit Message(const PointToPoint& point_to_point) : op(point_to_point) {}

  // recv, once the header is known: marks the message to be discarded if it is
  // not what the receive was posted for. `src` is the sender's rank.
  void check_fits(DType dtype, std::uint64_t count, std::uint32_t tag, int src);

  // How far the payload, of `nbytes`, may get in a turn that begins now.
  std::size_t end_of_turn(std::size_t nbytes) const { return done + std::min(kTurnNbytes, nbytes - done); }

  PointToPoint op;
  std::size_t done = 0;             // payload bytes moved so far
  bool is_started = false;          // the header is sent or has been seen
  bool is_patient = false;          // it may be left alone for long: see Batch::set_patient
  bool is_discarding = false;       // recv: the payload is taken off the stream and dropped
  std::size_t incoming_nbytes = 0;  // recv: payload size on the wire, once started
  std::string mismatch;             // recv: why it is discarded
};

// Called by one thread at a time.
class Channel {
 public:
  virtual ~Channel() = default;

  // Moves what can be moved without waiting, for one turn. True once the message is complete.
  // A receive throws Error{size_mismatch} (with peer and Message::mismatch) only
  // after the message that does not fit has been taken off the stream completely,
  // so that the next one can be found. Throws peer_lost, unreachable or channel_closed
  // if the other side ended before the message was complete.
  virtual bool try_send(Message& message) = 0;
  virtual bool try_recv(Message& message) = 0;

  // Whether the message, for which try_send() was called last, needs nothing more from this side as long as
  // it is patient.
  virtual bool is_left_to_peer([[maybe_unused]] const Message& message) const { return false; }

  // Ends this side of the channel and, unless this rank goes on in a successor of the group, tells the
  // peer that it has left. Does nothing where the peer learns that from the group's memory. Nothing but
  // the destructor is called afterwards.
  virtual void close(bool is_superseded) noexcept { static_cast<void>(is_superseded); }

  // Whether the peer has said here that it has left, whatever ended the group before.
  virtual bool has_peer_left() { return false; }

  // After close(): throws away what has arrived. True if there was something, and something sent to the
  // peer has yet to be delivered.
  virtual bool discard_unread() noexcept { return false; }

  // A descriptor to poll when nothing moves, or -1 for shared memory.
  virtual int poll_fd() const noexcept { return -1; }
};

// For channels that are closed and about to be destroyed: throws away what has arrived, and what the peers'
// kernels send once there is room for it. It would reach a closed socket, which resets the connection, and
// what has not been delivered is lost with it. Waits for kernels, not for peers to read, and only if
// something was unread; for all channels together.
void discard_rest(const std::vector<std::unique_ptr<Channel>>& channels) noexcept;

}  // namespace ferro

#endif  // FERRO_CHANNEL_HPP
