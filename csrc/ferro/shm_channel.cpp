#include "ferro/shm_channel.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ferro/cache_lines.hpp"
#include "ferro/clock.hpp"
#include "ferro/kernels.hpp"
#include "ferro/parking.hpp"
#include "ferro/shm_cost.hpp"

namespace ferro {
namespace {

// A large message is published piece by piece, so that the receiver copies one
// while the sender writes the next.
constexpr std::size_t kPieceNbytes = std::size_t{32} << 10;

// How long a sender that expects its message to be taken over lets the receiver see it first.
constexpr std::int64_t kTakerNs = 1000;

}  // namespace

ShmChannel::ShmChannel(std::shared_ptr<Segment> segment, std::shared_ptr<PeerMemory> peer_memory, int place,
                       int peer, int peer_rank)
    : segment_(std::move(segment)),
      peer_memory_(std::move(peer_memory)),
      place_(place),
      peer_(peer),
      peer_rank_(peer_rank),
      ring_nbytes_(segment_->layout().channel_nbytes),
      outgoing_(segment_->channel(place, peer)),
      incoming_(segment_->channel(peer, place)),
      outgoing_cells_(segment_->cells(place, peer)),
      incoming_cells_(segment_->cells(peer, place)),
      outgoing_ring_(segment_->ring(place, peer)),
      incoming_ring_(segment_->ring(peer, place)) {}

bool ShmChannel::has_departed() const { return segment_->control(peer_).has_left(); }

// Called after a sequentially consistent store, which is the publisher's fence of parking.hpp.
void ShmChannel::wake_peer() {
  std::atomic<std::uint32_t>& word = segment_->message_sleeper(peer_);
  if (is_parked_for(word.load(std::memory_order_seq_cst), place_)) unpark(word);
}

// ---- Sending ---------------------------------------------------------------

bool ShmChannel::try_send(Message& message) {
  if (!message.is_started && !start_send(message)) return false;
  const std::size_t end = message.end_of_turn(message.op.nbytes());
  while (message.done < end && !is_left_to_peer(message) && write_piece(message) != 0) {
    outgoing_.bytes_written.store(bytes_written_, std::memory_order_seq_cst);
    wake_peer();
  }
  const bool is_staged = message.done == message.op.nbytes();
  const bool has_left = !is_staged && has_departed();  // first: what it did before it left counts
  if (is_staged || has_been_read()) {
    if (lent_ != nullptr) expects_taker_ = !is_staged;
    lent_ = nullptr;
    return true;
  }
  if (has_left) throw Error(ErrorCode::channel_closed, peer_rank_);
  return false;
}

bool ShmChannel::is_left_to_peer(const Message& message) const {
  return message.is_patient && lent_ != nullptr && lent_->symmetric != 0;
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
    const bool is_lent = lend(message, cell.long_payload);
    cell.long_payload.staged_nbytes.store(is_lent ? 0 : write_piece(message), std::memory_order_relaxed);
    if (is_lent) lent_ = &cell.long_payload;
  }
  message.is_started = true;
  cell.flag.store(++messages_sent_, std::memory_order_seq_cst);
  wake_peer();
  if (lent_ != nullptr && expects_taker_ && !is_left_to_peer(message)) await_taker();
  // The next message, if it is as long, goes there.
  const std::size_t at = bytes_written_ % ring_nbytes_;
  if (shm_cost::is_worth_preparing(nbytes) && staging_.writes_through_caches())
    prepare_to_write(outgoing_ring_ + at, std::min(nbytes, ring_nbytes_ - at));
  return true;
}

// Says where the message is. False if it is to go through the ring as a whole.
bool ShmChannel::lend(const Message& message, LongPayload& payload) const {
  const std::size_t nbytes = message.op.nbytes();
  const bool may_be_private = nbytes >= shm_cost::kLentNbytes && peer_memory_->setting() != PeerReads::never;
  payload.symmetric =
      nbytes < shm_cost::kLentSymmetricNbytes ? 0 : segment_->symmetric_offset(message.op.data, nbytes);
  payload.address = may_be_private ? reinterpret_cast<std::uintptr_t>(message.op.data) : 0;
  return payload.is_lent();
}

// What is copied before the receiver takes over is copied in vain, so let it come first. Briefly: it need
// not be there.
void ShmChannel::await_taker() const {
  const std::int64_t end_ns = now_ns() + kTakerNs;
  while (lent_->staged_nbytes.load(std::memory_order_relaxed) == 0 && now_ns() < end_ns) pause_briefly();
}

// Copies the next piece into the ring, as far as there is room and the receiver has not taken over.
// Publishes nothing.
std::size_t ShmChannel::write_piece(Message& message) {
  const std::size_t wanted = std::min(kPieceNbytes, message.op.nbytes() - message.done);
  if (ring_nbytes_ - (bytes_written_ - peer_bytes_read_) < wanted)
    peer_bytes_read_ = outgoing_.bytes_read.load(std::memory_order_acquire);
  const std::size_t room = ring_nbytes_ - (bytes_written_ - peer_bytes_read_);
  const std::size_t at = bytes_written_ % ring_nbytes_;
  const std::size_t piece = std::min({room, wanted, ring_nbytes_ - at});
  if (lent_ != nullptr) {
    std::uint64_t before = message.done;
    if (!lent_->staged_nbytes.compare_exchange_strong(before, before + piece, std::memory_order_acq_rel))
      return 0;
  }
  staging_.copy(outgoing_ring_ + at, static_cast<const unsigned char*>(message.op.data) + message.done,
                piece);
  message.done += piece;
  bytes_written_ += piece;
  return piece;
}

// Whether the receiver, having taken over the message that is being sent, is through with it.
bool ShmChannel::has_been_read() {
  if (lent_ == nullptr) return false;
  peer_messages_read_ = outgoing_.messages_read.load(std::memory_order_acquire);
  return peer_messages_read_ == messages_sent_;
}

// ---- Receiving -------------------------------------------------------------

bool ShmChannel::try_recv(Message& message) {
  if (!message.is_started && !start_recv(message)) {
    awaited_ = messages_received_ + 1;
    if (!has_departed()) return false;
    // What a peer published before it departed counts.
    if (!start_recv(message)) throw Error(ErrorCode::channel_closed, peer_rank_);
  }
  const std::size_t end = message.end_of_turn(message.incoming_nbytes);
  read_until(std::min(end, ring_end_), message);
  if (borrowed_ != nullptr && message.done >= ring_end_) read_in_place(end, message);
  if (message.done != message.incoming_nbytes) {
    if (!has_departed()) return false;
    read_until(ring_end_, message);
    if (message.done != message.incoming_nbytes) throw Error(ErrorCode::channel_closed, peer_rank_);
  }
  if (began_ns_ != 0)
    copy_choice_.note(message.incoming_nbytes, was_borrowed_,
                      static_cast<double>(now_ns() - began_ns_) * 1e-9);
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
  Cell& cell = incoming_cells_[messages_received_ % SegmentLayout::kCells];
  if (cell.flag.load(std::memory_order_acquire) != messages_received_ + 1) return false;
  const auto dtype = static_cast<DType>(cell.dtype);
  message.is_started = true;
  message.incoming_nbytes = cell.count * item_size(dtype);
  ring_end_ = message.incoming_nbytes;
  borrowed_ = nullptr;
  was_borrowed_ = false;
  began_ns_ = 0;
  message.check_fits(dtype, cell.count, cell.tag, peer_rank_);
  if (message.incoming_nbytes <= Cell::kInlineNbytes) {
    if (!message.is_discarding && message.incoming_nbytes != 0)
      std::memcpy(message.op.data, cell.payload, message.incoming_nbytes);
    message.done = message.incoming_nbytes;
  } else if (cell.long_payload.is_lent()) {
    take_over(message, cell.long_payload);
  } else {
    peer_bytes_written_ = bytes_read_ + cell.long_payload.staged_nbytes.load(std::memory_order_relaxed);
  }
  return true;
}

// From here on the sender puts nothing more into the ring, if that is the better way.
void ShmChannel::take_over(Message& message, LongPayload& payload) {
  const bool is_timed = awaited_ == messages_received_ + 1 && payload.symmetric == 0;
  if (is_timed && !message.is_discarding) began_ns_ = now_ns();
  if (!message.is_discarding && !wants(payload, message.incoming_nbytes)) return;
  if (message.is_patient) {
    // The sender waits for whoever has taken over. So this is done in one go or not at all: while the sender
    // is writing a piece, which this rank would have to come back for, the message stays the sender's.
    const std::uint64_t written = incoming_.bytes_written.load(std::memory_order_acquire);
    std::uint64_t staged = std::max(bytes_read_, written) - bytes_read_;
    if (!payload.staged_nbytes.compare_exchange_strong(staged, staged | LongPayload::kTakenOver,
                                                       std::memory_order_acq_rel))
      return;
    ring_end_ = staged;
  } else {
    ring_end_ = payload.staged_nbytes.fetch_or(LongPayload::kTakenOver, std::memory_order_acq_rel);
  }
  if (ring_end_ == message.incoming_nbytes) return;  // the sender was done
  borrowed_ = &payload;
  was_borrowed_ = true;
}

bool ShmChannel::wants(const LongPayload& payload, std::size_t nbytes) {
  if (payload.symmetric != 0) return true;  // never slower
  const PeerReads setting = peer_memory_->setting();
  if (setting == PeerReads::never || !peer_memory_->can_read(peer_)) return false;
  return setting == PeerReads::always || copy_choice_.pulls(nbytes);
}

void ShmChannel::read_until(std::size_t end, Message& message) {
  while (message.done < end) {
    if (peer_bytes_written_ == bytes_read_) {
      // The counter lags behind where a first piece was published by its cell alone.
      peer_bytes_written_ = std::max(bytes_read_, incoming_.bytes_written.load(std::memory_order_acquire));
      if (peer_bytes_written_ == bytes_read_) return;
    }
    const std::size_t at = bytes_read_ % ring_nbytes_;
    const std::size_t piece = std::min(
        {static_cast<std::size_t>(peer_bytes_written_ - bytes_read_), end - message.done, ring_nbytes_ - at});
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

// Moves nothing if that fails. Throws if it is not certain that the message was still there.
void ShmChannel::read_in_place(std::size_t end, Message& message) {
  unsigned char* const dst = static_cast<unsigned char*>(message.op.data) + message.done;
  const std::size_t nbytes = end - message.done;
  if (message.is_discarding) {
    end = message.incoming_nbytes;  // nobody wants it
  } else if (borrowed_->symmetric != 0) {
    const unsigned char* const src = segment_->symmetric_pointer(borrowed_->symmetric);
    copy_to_user(dst, src + message.done, nbytes, message.incoming_nbytes);
  } else {
    const auto* const src =
        reinterpret_cast<const unsigned char*>(static_cast<std::uintptr_t>(borrowed_->address));
    if (peer_memory_->read(peer_, dst, src + message.done, nbytes) != 0) return give_back(message);
  }
  // A sender that gave up may have put something else there before it was read.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (has_departed() || segment_->abort_word().load(std::memory_order_acquire) != 0)
    throw Error(ErrorCode::channel_closed, peer_rank_);
  message.done = end;
}

// Has the sender put into the ring what cannot be read where it stands.
void ShmChannel::give_back(Message& message) {
  message.done = ring_end_;
  ring_end_ = message.incoming_nbytes;
  borrowed_->staged_nbytes.fetch_and(~LongPayload::kTakenOver, std::memory_order_seq_cst);
  borrowed_ = nullptr;
  wake_peer();
}

}  // namespace ferro
