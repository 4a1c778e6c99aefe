// What carries a group's collectives: shared memory (shm_transport.hpp), TCP
// (tcp_transport.hpp), or the two together (hosts_transport.hpp).
#ifndef FERRO_TRANSPORT_HPP
#define FERRO_TRANSPORT_HPP

#include <cstdint>

#include "ferro/call.hpp"
#include "ferro/error.hpp"
#include "ferro/types.hpp"

namespace ferro {

// Ranks in errors and in AbortReason are always ranks of the whole group, also
// where a transport joins only some of them.
//
// run() is called by one thread at a time, in the same order on every rank; abort(),
// aborted() and closing may come from any thread at any moment.
class Transport {
 public:
  virtual ~Transport() = default;

  // Runs one collective to its end on this rank. Throws Error{mismatch}, with
  // every buffer untouched and the group still usable, if ranks disagree; after
  // any other Error the group cannot go on.
  virtual void run(Call& call, const Collective& collective) = 0;

  // Ends the group on every rank, for the first reason that anybody gave.
  // Wakes all waits of this rank and its peers.
  virtual void abort(AbortReason reason) noexcept = 0;
  // The reason that won; code none while the group is well.
  virtual AbortReason aborted() const noexcept = 0;
};

// A group's point-to-point messages: for each peer an ordered stream each way,
// independent of the group's collectives.
//
// Called by one thread at a time. A message is progressed in pieces so that
// many can be under way at once, sends and receives together.
struct Message {
  PointToPoint op;
  std::size_t done = 0;         // payload bytes copied so far
  bool is_started = false;      // the header is sent or has been seen
  bool is_discarding = false;   // recv: the header did not fit; the payload is dropped
  std::size_t incoming_nbytes = 0;  // recv: payload size on the wire, once started
};

class Channel {
 public:
  virtual ~Channel() = default;
  // Moves what can be moved without waiting. True once the message is complete.
  // recv throws Error{size_mismatch} (peer and detail set) after a message that
  // does not fit has been taken off the stream whole, so that the next one fits.
  virtual bool try_send(Message& message) = 0;
  virtual bool try_recv(Message& message) = 0;
  // A descriptor to poll for this direction when nothing moves, or -1.
  virtual int poll_fd() const noexcept { return -1; }
};

}  // namespace ferro

#endif  // FERRO_TRANSPORT_HPP
