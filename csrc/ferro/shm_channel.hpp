// Messages between two ranks of one host.
//
// A message is one cell, with its size and up to 40 bytes of payload in the cache
// line of its flag; a longer payload follows through a ring of bytes. Cells are kept
// apart from the ring, so that a flag is never looked for where payload may be.
//
// Sender: writes the first piece, publishes the cell, then writes and publishes
// further pieces as the receiver frees the ring. Receiver: sees the cell's number,
// copies out. A short message costs one cache line, and the lines of a payload
// that goes through the ring.
#ifndef FERRO_SHM_CHANNEL_HPP
#define FERRO_SHM_CHANNEL_HPP

#include <memory>

#include "ferro/channel.hpp"
#include "ferro/segment.hpp"
#include "ferro/staging.hpp"

namespace ferro {

class ShmChannel final : public Channel {
 public:
  // Between the ranks at `index` (this one) and `peer` of the segment.
  ShmChannel(std::shared_ptr<Segment> segment, int index, int peer, int peer_rank);

  bool try_send(Message& message) override;
  bool try_recv(Message& message) override;

 private:
  bool start_send(Message& message);
  bool start_recv(Message& message);
  std::size_t write_piece(Message& message);
  void read_until(std::size_t end, Message& message);
  void wake_peer();
  bool has_departed() const;

  std::shared_ptr<Segment> segment_;
  const int index_;
  const int peer_;
  const int peer_rank_;
  const std::size_t ring_nbytes_;
  ChannelControl& outgoing_;
  ChannelControl& incoming_;
  Cell* const outgoing_cells_;
  Cell* const incoming_cells_;
  unsigned char* const outgoing_ring_;
  unsigned char* const incoming_ring_;
  StagingWriter staging_;
  // Only this rank moves these; the shared copies are for the peer.
  std::uint64_t messages_sent_ = 0;
  std::uint64_t messages_received_ = 0;
  std::uint64_t bytes_written_ = 0;
  std::uint64_t bytes_read_ = 0;
  // Lower bounds of the peer's counters, whose cache lines are read only when these say "full" or "empty".
  std::uint64_t peer_messages_read_ = 0;
  std::uint64_t peer_bytes_read_ = 0;
  std::uint64_t peer_bytes_written_ = 0;
};

}  // namespace ferro

#endif  // FERRO_SHM_CHANNEL_HPP
