// Transfers between one rank and any number of peers, which all make progress together.
#ifndef FERRO_EXCHANGE_HPP
#define FERRO_EXCHANGE_HPP

#include <cstddef>

#include "ferro/call.hpp"
#include "ferro/frame.hpp"
#include "ferro/pieces.hpp"
#include "ferro/tcp_mesh.hpp"

namespace ferro {

// Sends and receives are queued, in stream order for each peer and direction, and
// move while wait() or finish() runs. Between two waits more may be queued, such as
// what an arrival has made possible. One exchange at a time on a mesh.
//
// Queued memory must stay in place until it has moved. wait() and finish()
// throw Error{timeout} naming the peers from whom data is missing, the Error of
// whatever ended the group, or Error{io} on bytes that are not of our protocol.
class Exchange {
 public:
  Exchange(TcpMesh& mesh, Call& call);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void send(int peer, const void* data, std::size_t nbytes);
  void send(int peer, Piece piece) { send(peer, piece.data, piece.nbytes); }
  void receive(int peer, void* data, std::size_t nbytes);
  void receive(int peer, Piece piece) { receive(peer, piece.data, piece.nbytes); }

  // A frame and its payload of `frame.payload_nbytes`. At most one frame may be under
  // way to each peer.
  void send_frame(int peer, const Frame& frame, const void* payload);
  // `payload_nbytes` is the payload that should come with it; a frame with another one
  // is received all the same.
  void receive_frame(int peer, std::size_t payload_nbytes);
  bool has_frame(int peer) const { return mesh_.lane(peer).frame_nbytes > 0; }
  // A frame that has arrived; it stays until the next receive from this peer is queued.
  Frame frame(int peer) const;
  const void* payload(int peer) const;

  // Payload bytes since the exchange began, frames aside.
  std::size_t num_sent(int peer) const { return mesh_.lane(peer).num_sent; }
  std::size_t num_received(int peer) const { return mesh_.lane(peer).num_received; }

  bool is_done() const { return num_pending_ == 0; }
  // Returns once something has moved.
  void wait();
  // Returns once everything has moved.
  void finish() {
    while (!is_done()) wait();
  }

 private:
  using Lane = TcpMesh::Lane;

  Lane& activate(int peer);
  static void release_frame(Lane& lane);
  void await_progress();
  bool progress();
  bool send_some(Lane& lane);
  bool receive_some(Lane& lane);
  bool receive_frame_some(Lane& lane);
  void check_frame(Lane& lane, const Frame& frame);
  bool spin();
  void sleep();
  void list_poll_entries();
  void check_caller(bool was_signalled);
  void note_awaited();
  Error timeout_error() const;

  TcpMesh& mesh_;
  Call& call_;
  std::size_t num_pending_ = 0;
  std::size_t num_turns_ = 0;  // since check_caller()
};

}  // namespace ferro

#endif  // FERRO_EXCHANGE_HPP
