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
//
// The sender of a long message lends it: the receiver may take over what is not in the ring yet, and
// reads that where it stands. Only then does the sender wait for the receiver, who is at work on the
// message; a send whose receiver is not there completes once all is in the ring. A patient one of a symmetric
// message, which is always taken over, puts nothing there. A patient receive takes over only what it can read
// at once.
#ifndef FERRO_SHM_CHANNEL_HPP
#define FERRO_SHM_CHANNEL_HPP

#include <memory>

#include "ferro/channel.hpp"
#include "ferro/copy_choice.hpp"
#include "ferro/peer_memory.hpp"
#include "ferro/segment.hpp"
#include "ferro/staging.hpp"

namespace ferro {

class ShmChannel final : public Channel {
 public:
  // Between the ranks at `place` (this one) and `peer` of the segment.
  ShmChannel(std::shared_ptr<Segment> segment, std::shared_ptr<PeerMemory> peer_memory, int place, int peer,
             int peer_rank);

  bool try_send(Message& message) override;
  bool try_recv(Message& message) override;
  bool is_left_to_peer(const Message& message) const override;

 private:
  bool start_send(Message& message);
  bool start_recv(Message& message);
  bool lend(const Message& message, LongPayload& payload) const;
  void await_taker() const;
  std::size_t write_piece(Message& message);
  bool has_been_read();
  void take_over(Message& message, LongPayload& payload);
  bool wants(const LongPayload& payload, std::size_t nbytes);
  void read_until(std::size_t end, Message& message);
  void read_in_place(std::size_t end, Message& message);
  void give_back(Message& message);
  void wake_peer();
  bool has_departed() const;

  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<PeerMemory> peer_memory_;
  const int place_;
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
  // Of the message that is being sent.
  LongPayload* lent_ = nullptr;
  bool expects_taker_ = false;  // the last one that was lent was taken over
  // Of the message that is being received, if it is long.
  LongPayload* borrowed_ = nullptr;  // taken over
  std::size_t ring_end_ = 0;         // what comes before goes through the ring
  std::int64_t began_ns_ = 0;        // 0 if this rank came later than the message
  bool was_borrowed_ = false;        // also if it was given back
  CopyChoice copy_choice_;           // of lent messages: whether to take them over
  std::uint64_t awaited_ = 0;        // 1 + the number of the last message that was not there yet
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
