#include "ferro/shm_channel.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "ferro/kernels.hpp"
#include "ferro/parking.hpp"
#include "ferro/shm_cost.hpp"

namespace ferro {
namespace {

// A large message is published piece by piece, so that the receiver copies one
// while the sender writes the next.
constexpr std::size_t kPieceNbytes = std::size_t{32} << 10;

}  // namespace

ShmChannel::ShmChannel(std::shared_ptr<Segment> segment, int index, int peer, int peer_rank)
    : segment_(std::move(segment)),
      index_(index),
      peer_(peer),
      peer_rank_(peer_rank),
      ring_nbytes_(segment_->layout().channel_nbytes),
      outgoing_(segment_->channel(index, peer)),
      incoming_(segment_->channel(peer, index)),
      outgoing_cells_(segment_->cells(index, peer)),
      incoming_cells_(segment_->cells(peer, index)),
      outgoing_ring_(segment_->ring(index, peer)),
      incoming_ring_(segment_->ring(peer, index)) {}

bool ShmChannel::has_departed() const {
  return segment_->control(peer_).has_departed.load(std::memory_order_acquire) != 0;
}

// Called after a sequentially consistent store, which is the publisher's fence of parking.hpp.
void ShmChannel::wake_peer() {
  std::atomic<std::uint32_t>& word = segment_->message_sleeper(peer_);
  if (is_parked_for(word.load(std::memory_order_seq_cst), index_)) unpark(word);
}

// ---- Sending ---------------------------------------------------------------

bool ShmChannel::try_send(Message& message) {
  if (!message.is_started && !start_send(message)) return false;
  const std::size_t end = message.end_of_turn(message.op.nbytes());
  while (message.done < end && write_piece(message) != 0) {
    outgoing_.bytes_written.store(bytes_written_, std::memory_order_seq_cst);
    wake_peer();
  }
  if (message.done == message.op.nbytes()) return true;
  if (has_departed()) throw Error(ErrorCode::channel_closed, peer_rank_);
  return false;
}

bool ShmChannel::start_send(Message& message) {
  if (has_departed()) throw Error(ErrorCode::channel_closed, peer_rank_);
  if (messages_sent_ - peer_messages_read_ == SegmentLayout::kCells) {
    peer_messages_read_ = outgoing_.messages_read.load(std::memory_order_acquire);
    if (messages_sent_ - peer_messages_read_ == SegmentLayout::kCells) return false;
  }
  Cell& cell = outgoing_cells_[messages_sent_ % SegmentLayout::kCells];
  const std::size_t nbytes = message.op.nbytes();
  cell.count = message.op.count;
  cell.tag = message.op.tag;
  cell.dtype = static_cast<std::uint32_t>(message.op.dtype);
  if (nbytes <= Cell::kInlineNbytes) {
    if (nbytes != 0) std::memcpy(cell.payload, message.op.data, nbytes);
    message.done = nbytes;
  } else {
    const std::uint64_t ready_nbytes = write_piece(message);
    std::memcpy(cell.payload, &ready_nbytes, sizeof ready_nbytes);
  }
  message.is_started = true;
  cell.flag.store(++messages_sent_, std::memory_order_seq_cst);
  wake_peer();
  // The next message, if it is as long, goes there.
  const std::size_t at = bytes_written_ % ring_nbytes_;
  if (shm_cost::is_worth_preparing(nbytes) && staging_.writes_through_caches())
    prepare_to_write(outgoing_ring_ + at, std::min(nbytes, ring_nbytes_ - at));
  return true;
}

// Copies the next piece into the ring, as far as there is room. Publishes nothing.
std::size_t ShmChannel::write_piece(Message& message) {
  const std::size_t wanted = std::min(kPieceNbytes, message.op.nbytes() - message.done);
  if (ring_nbytes_ - (bytes_written_ - peer_bytes_read_) < wanted)
    peer_bytes_read_ = outgoing_.bytes_read.load(std::memory_order_acquire);
  const std::size_t room = ring_nbytes_ - (bytes_written_ - peer_bytes_read_);
  const std::size_t at = bytes_written_ % ring_nbytes_;
  const std::size_t piece = std::min({room, wanted, ring_nbytes_ - at});
  staging_.copy(outgoing_ring_ + at, static_cast<const unsigned char*>(message.op.data) + message.done,
                piece);
  message.done += piece;
  bytes_written_ += piece;
  return piece;
}

// ---- Receiving -------------------------------------------------------------

bool ShmChannel::try_recv(Message& message) {
  if (!message.is_started && !start_recv(message)) {
    if (!has_departed()) return false;
    // What a peer published before it departed counts.
    if (!start_recv(message)) throw Error(ErrorCode::channel_closed, peer_rank_);
  }
  read_until(message.end_of_turn(message.incoming_nbytes), message);
  if (message.done != message.incoming_nbytes) {
    if (!has_departed()) return false;
    read_until(message.incoming_nbytes, message);
    if (message.done != message.incoming_nbytes) throw Error(ErrorCode::channel_closed, peer_rank_);
  }
  ++messages_received_;
  // The next store orders this one, too, before the look at the sleeper's word: on any processor, though
  // the language promises it only for what is sequentially consistent itself.
  incoming_.bytes_read.store(bytes_read_, std::memory_order_release);
  incoming_.messages_read.store(messages_received_, std::memory_order_seq_cst);
  wake_peer();
  if (message.is_discarding) throw Error(ErrorCode::size_mismatch, peer_rank_, message.mismatch);
  return true;
}

bool ShmChannel::start_recv(Message& message) {
  const Cell& cell = incoming_cells_[messages_received_ % SegmentLayout::kCells];
  if (cell.flag.load(std::memory_order_acquire) != messages_received_ + 1) return false;
  const auto dtype = static_cast<DType>(cell.dtype);
  message.is_started = true;
  message.incoming_nbytes = cell.count * item_size(dtype);
  message.check_fits(dtype, cell.count, cell.tag, peer_rank_);
  if (message.incoming_nbytes <= Cell::kInlineNbytes) {
    if (!message.is_discarding && message.incoming_nbytes != 0)
      std::memcpy(message.op.data, cell.payload, message.incoming_nbytes);
    message.done = message.incoming_nbytes;
  } else {
    std::uint64_t ready_nbytes;
    std::memcpy(&ready_nbytes, cell.payload, sizeof ready_nbytes);
    peer_bytes_written_ = bytes_read_ + ready_nbytes;
  }
  return true;
}

void ShmChannel::read_until(std::size_t end, Message& message) {
  while (message.done < end) {
    if (peer_bytes_written_ == bytes_read_) {
      // The counter lags behind where a first piece was published by its cell alone.
      peer_bytes_written_ = std::max(bytes_read_, incoming_.bytes_written.load(std::memory_order_acquire));
      if (peer_bytes_written_ == bytes_read_) return;
    }
    const std::size_t at = bytes_read_ % ring_nbytes_;
    const std::size_t piece = std::min({static_cast<std::size_t>(peer_bytes_written_ - bytes_read_),
                                        message.incoming_nbytes - message.done, ring_nbytes_ - at});
    if (!message.is_discarding)
      copy_to_user(static_cast<unsigned char*>(message.op.data) + message.done, incoming_ring_ + at, piece,
                   message.incoming_nbytes);
    message.done += piece;
    bytes_read_ += piece;
    if (message.done == message.incoming_nbytes) return;  // published with the end of the message
    incoming_.bytes_read.store(bytes_read_, std::memory_order_seq_cst);
    wake_peer();
  }
}

}  // namespace ferro
