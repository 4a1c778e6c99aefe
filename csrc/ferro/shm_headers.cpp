// The headers of ShmTransport: what a rank publishes to start a collective, and where it finds the inputs of
// the others once all have. ALGORITHMS.md, section Headers.
#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "ferro/cache_lines.hpp"
#include "ferro/clock.hpp"
#include "ferro/fingerprint.hpp"
#include "ferro/pages.hpp"
#include "ferro/shm_cost.hpp"
#include "ferro/shm_transport.hpp"

namespace ferro {

// What a header carries when the input does not fit into it.
struct Offer {
  std::uint64_t in;           // in the symmetric heaps, plus one; 0 if it is not there
  std::uint64_t out;          // likewise
  std::uint64_t staged_at;    // in the rank's ring of small payloads
  std::uint64_t address;      // in this rank's own memory
  std::uint64_t out_address;  // the output's, of an allreduce
  std::uint32_t staging_ns;   // how long staging took, if it might have been pulled instead
  bool is_staged;             // in that ring
  bool is_pull_open;          // its input is staged or pulled, whichever is faster
  bool may_be_pulled;         // it can read its peers, and lets them read its arrays
  bool shall_be_pulled_next;  // the next time, if this is the rank that chooses for all: see PullChoice
};
static_assert(sizeof(Offer) <= HeaderSlot::kInlineNbytes, "must travel in a header");

namespace {

Offer offer_of(const HeaderSlot& slot) {
  Offer offer;
  std::memcpy(&offer, slot.payload, sizeof offer);
  return offer;
}

// Whether it leaves the inputs as they are, whatever becomes of it. A reduction in place does not.
bool keeps_inputs(const Collective& collective) {
  return collective.op != Op::allreduce && collective.op != Op::reduce_scatter;
}

// What a rank gives for others to read.
std::size_t input_nbytes(const Collective& collective, std::size_t size, bool is_root) {
  const std::size_t nbytes = collective.nbytes();
  switch (collective.op) {
    case Op::allreduce:
    case Op::reduce:
    case Op::all_gather:
    case Op::split:
    case Op::gather:
      return nbytes;
    case Op::broadcast:
      return is_root ? nbytes : 0;
    case Op::scatter:
      return is_root ? nbytes * size : 0;
    case Op::reduce_scatter:
    case Op::all_to_all:
      return nbytes * size;
    default:
      return 0;
  }
}

}  // namespace

// An input of this size is copied, into the header or the ring: then no peer waits for this rank's reading,
// nor it for theirs. Below kSymmetricNbytes those of all peers are copied as well. So are those of an
// allreduce, whatever their size: one that is copied keeps all others from being read in place.
bool ShmTransport::begin(const Collective& collective) {
  const bool is_allreduce = collective.op == Op::allreduce;
  const std::size_t most = std::max(shm_cost::kSymmetricNbytes - 1,
                                    is_allreduce ? segment_->layout().small_nbytes : std::size_t{0});
  if (is_uneven(collective) || input_nbytes(collective, size_, true) > most) return false;
  check_group();
  publish_header(collective, false);
  may_lack_inputs_ = is_allreduce && collective.nbytes() >= shm_cost::kSymmetricNbytes;
  has_begun_ = true;
  return true;
}

void ShmTransport::publish_header(const Collective& collective, bool may_lend_symmetric) {
  const unsigned parity = ++sequence_ & 1;
  HeaderSlot& slot = segment_->header(place_, parity);
  if (is_uneven(collective)) {
    publish_counts(collective, slot);
  } else {
    publish_input(collective, slot, may_lend_symmetric);
  }
  // Made where it stays: a copy would wait until all the fields of the original are in the cache.
  const auto* fingerprint = new (&segment_->control(place_).fingerprints[parity])
      Fingerprint(fingerprint_of(collective, sequence_));
  own_flag_ = flag_of(sequence_, hash(*fingerprint));
  // Last: a peer that sees this sequence may read all of the above.
  slot.flag.store(own_flag_, std::memory_order_seq_cst);
  wake_sleepers();
}

// The next place in this rank's ring. It is used again after at least kSmallSlots - 1 further
// payloads; two places would do, as with the headers. A longer ring avoids the lines that
// peers still hold in their caches, each of which would have to be taken back from them.
std::size_t ShmTransport::next_small(std::size_t nbytes) {
  const std::size_t at = small_offset(nbytes);
  next_small_ = at + round_up(nbytes, kLinePair);
  return at;
}

std::size_t ShmTransport::small_offset(std::size_t nbytes) const {
  return next_small_ + nbytes <= segment_->layout().small_ring_nbytes ? next_small_ : 0;
}

// Fetches the lines that the next payload will be written to if it is as large as this one. Called where
// this rank would only wait.
void ShmTransport::prepare_next_small() {
  const std::size_t nbytes = std::exchange(small_nbytes_, 0);
  if (!shm_cost::is_worth_preparing(nbytes) || !staging_.writes_through_caches()) return;
  prepare_to_write(segment_->small_ring(place_) + small_offset(nbytes), nbytes);
}

// The rows of counts are all that the header of an uneven all_to_all carries.
void ShmTransport::publish_counts(const Collective& collective, HeaderSlot& slot) {
  is_inline_ = false;
  Offer offer{};
  offer.staged_at = next_small(2 * sizeof(std::uint64_t) * static_cast<std::size_t>(size_));
  std::memcpy(slot.payload, &offer, sizeof offer);
  auto* counts = reinterpret_cast<std::uint64_t*>(segment_->small_ring(place_) + offer.staged_at);
  for (int peer = 0; peer < size_; ++peer) {
    counts[peer] = collective.send_counts[peer];
    counts[size_ + peer] = collective.recv_counts[peer];
  }
}

void ShmTransport::publish_input(const Collective& collective, HeaderSlot& slot, bool may_lend_symmetric) {
  const std::size_t nbytes = input_nbytes(collective, size_, is_root(collective));
  // Where arrays may be pulled, every header carries an Offer, even that of a rank that gives nothing: its
  // peers look there for may_be_pulled. So does a rank that reads nobody, since its peers may not know that.
  is_inline_ = nbytes <= HeaderSlot::kInlineNbytes && collective.nbytes() < shm_cost::kPullNbytes;
  if (is_inline_) {
    if (nbytes != 0) std::memcpy(slot.payload, collective.in, nbytes);
    return;
  }
  Offer offer{};
  // An all_to_all in place overwrites what peers would still be reading.
  const bool is_readable_in_place = collective.op != Op::all_to_all || collective.in != collective.out;
  if (nbytes >= shm_cost::kSymmetricNbytes && is_readable_in_place && may_lend_symmetric) {
    offer.in = segment_->symmetric_offset(collective.in, nbytes);
    offer.out = segment_->symmetric_offset(collective.out, nbytes);
  }
  // Staging is faster than to read it where it stands; a system call would not change that.
  const bool is_staged_nevertheless =
      offer.in != 0 && collective.op == Op::broadcast && nbytes < shm_cost::symmetric_broadcast_nbytes(size_);
  if (is_staged_nevertheless) offer.in = offer.out = 0;
  if (pull_choice_.is_open(collective)) {
    offer.is_pull_open = !is_staged_nevertheless;
    if (offer.is_pull_open && lends_ && pull_choice_.is_pulled(collective) && peer_memory_->can_read_all())
      offer_to_lend(collective, nbytes, offer);
    offer.shall_be_pulled_next =
        pull_choice_.is_chooser(collective) && pull_choice_.shall_pull_next(collective);
  }
  if (offer.in == 0 && !offer.may_be_pulled && nbytes != 0 && nbytes <= segment_->layout().small_nbytes &&
      size_ > 1)
    stage_small(collective, nbytes, offer);
  std::memcpy(slot.payload, &offer, sizeof offer);
}

void ShmTransport::stage_small(const Collective& collective, std::size_t nbytes, Offer& offer) {
  const std::int64_t start_ns = offer.is_pull_open ? now_ns() : 0;
  offer.staged_at = next_small(nbytes);
  offer.is_staged = true;
  small_nbytes_ = nbytes;
  unsigned char* const staged = segment_->small_ring(place_) + offer.staged_at;
  staging_.copy(staged, collective.in, nbytes);
  if (shm_cost::is_worth_handing_over(nbytes)) hand_over(staged, nbytes);
  if (start_ns != 0)
    offer.staging_ns = static_cast<std::uint32_t>(std::min<std::int64_t>(now_ns() - start_ns, UINT32_MAX));
}

// Says where peers may read this rank's arrays in its own memory.
void ShmTransport::offer_to_lend(const Collective& collective, std::size_t nbytes, Offer& offer) {
  offer.address = reinterpret_cast<std::uintptr_t>(collective.in);
  offer.out_address = reinterpret_cast<std::uintptr_t>(collective.out);
  offer.may_be_pulled = nbytes == 0 || offer.in != 0 || may_lend(collective, collective.in, nbytes);
  const bool is_output_read = collective.op == Op::allreduce && !shm_cost::pulling_whole_wins(nbytes, size_);
  if (is_output_read && collective.in != collective.out && offer.out == 0)
    offer.may_be_pulled = offer.may_be_pulled && may_lend(collective, collective.out, nbytes);
}

// Looking costs a microsecond or two, as the pages that are looked at are what peers read next.
bool ShmTransport::may_lend(const Collective& collective, const void* data, std::size_t nbytes) const {
  const bool must_look = looks_before_lending_ || !keeps_inputs(collective);
  return !must_look || peer_memory_->can_lend(data, nbytes);
}

// The same two ranks are named on every rank: the first, and the first that differs from it.
void ShmTransport::check_fingerprints() const {
  const unsigned parity = sequence_ & 1;
  const Fingerprint& first = segment_->control(0).fingerprints[parity];
  for (int peer = 1; peer < size_; ++peer) {
    const Fingerprint& other = segment_->control(peer).fingerprints[parity];
    if (other != first) throw mismatch_error(members_[place_], members_[0], first, members_[peer], other);
  }
}

// The rows that a rank published: what it sends to each, then what it expects from each.
const std::uint64_t* ShmTransport::counts_of(int place) const {
  const Offer offer = offer_of(segment_->header(place, sequence_ & 1));
  return reinterpret_cast<const std::uint64_t*>(segment_->small_ring(place) + offer.staged_at);
}

void ShmTransport::check_counts() const {
  for (int src = 0; src < size_; ++src) {
    const std::uint64_t* sent = counts_of(src);
    for (int dst = 0; dst < size_; ++dst) {
      const std::uint64_t* received = counts_of(dst) + size_;
      if (sent[dst] == received[src]) continue;
      throw unpaired_error(members_[place_], members_[src], sent[dst], members_[dst], received[src]);
    }
  }
}

// Fills inputs_ from all headers. An input that its header does not carry is in one of three places, or
// nowhere yet; the flags then say in which row of their table all of them together are.
void ShmTransport::find_inputs(const Collective& collective) {
  inputs_.reset();
  inputs_.are_kept = keeps_inputs(collective);
  inputs_.are_symmetric = size_ > 1;  // a rank that is alone reads nobody's
  if (is_uneven(collective)) return check_counts();
  if (input_nbytes(collective, size_, true) <= HeaderSlot::kInlineNbytes)
    return find_inline_inputs(collective);

  const bool is_pulled = agree_to_pull(collective);
  const unsigned parity = sequence_ & 1;
  const int root = has_root(collective.op) ? place_of_[collective.root] : -1;
  for (int peer = 0; peer < size_; ++peer) {
    const std::size_t nbytes = input_nbytes(collective, size_, peer == root);
    const HeaderSlot& slot = segment_->header(peer, parity);
    const unsigned char*& input = inputs_.at[peer];
    if (nbytes <= HeaderSlot::kInlineNbytes) {
      input = slot.payload;
      inputs_.are_symmetric = false;
      continue;
    }
    const Offer offer = offer_of(slot);
    inputs_.are_symmetric &= offer.in != 0 && offer.out != 0;
    inputs_.is_choice_open &= offer.is_pull_open;
    if (offer.in != 0) {  // in symmetric memory
      input = segment_->symmetric_pointer(offer.in);
      find_output(peer, offer.out, offer.out_address);
      inputs_.are_borrowed = size_ > 1;
    } else if (offer.is_staged) {  // a copy, in the ring of its rank
      input = segment_->small_ring(peer) + offer.staged_at;
      inputs_.staging_ns = std::max(inputs_.staging_ns, offer.staging_ns);
    } else if (is_pulled) {  // in the memory of its rank
      input = reinterpret_cast<const unsigned char*>(static_cast<std::uintptr_t>(offer.address));
      inputs_.is_foreign[peer] = peer != place_;
      find_output(peer, offer.out, offer.out_address);
      inputs_.are_borrowed = inputs_.are_pulled = true;
    } else {  // nowhere yet
      input = nullptr;
      inputs_.are_complete &= size_ == 1;
    }
  }
  // An allreduce reads symmetric memory only if it can write its results there, too.
  if (collective.op == Op::allreduce && !inputs_.are_symmetric && !inputs_.are_pulled)
    inputs_.are_complete &= !inputs_.are_borrowed;
  inputs_.are_borrowed &= inputs_.are_complete;  // rounds read windows alone
  inputs_.at[place_] = static_cast<const unsigned char*>(collective.in);
}

// The same where every header carries all that its rank gives.
void ShmTransport::find_inline_inputs(const Collective& collective) {
  const unsigned parity = sequence_ & 1;
  for (int peer = 0; peer < size_; ++peer) inputs_.at[peer] = segment_->header(peer, parity).payload;
  inputs_.at[place_] = static_cast<const unsigned char*>(collective.in);
  inputs_.are_symmetric = false;
}

bool ShmTransport::is_input_symmetric(int place) const {
  return offer_of(segment_->header(place, sequence_ & 1)).in != 0;
}

void ShmTransport::find_output(int peer, std::uint64_t symmetric, std::uint64_t address) {
  inputs_.is_output_foreign[peer] = symmetric == 0;
  inputs_.output_at[peer] = symmetric != 0
                                ? segment_->symmetric_pointer(symmetric)
                                : reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(address));
}

// Every rank comes to the same answer, from the headers. A rank offers nothing before it has tried
// to read every other, which it does here, where all are known to be there.
bool ShmTransport::agree_to_pull(const Collective& collective) {
  if (!pull_choice_.is_open(collective)) return false;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != place_) peer_memory_->can_read(peer);
  const unsigned parity = sequence_ & 1;
  const int chooser = pull_choice_.chooser_of(collective);
  pull_choice_.set_pulled(collective, offer_of(segment_->header(chooser, parity)).shall_be_pulled_next);
  for (int peer = 0; peer < size_; ++peer)
    if (!offer_of(segment_->header(peer, parity)).may_be_pulled) return false;
  return true;
}

void ShmTransport::fence(Call& call, std::size_t nbytes) {
  read_nbytes_ = nbytes;
  segment_->header(place_, (sequence_ + 1) & 1).payload[0] = inputs_.were_read;
  publish_header(Collective{});
  await_headers(call);
  read_nbytes_ = 0;
}

// What the ranks have said in the fence.
bool ShmTransport::have_all_read() const {
  for (int peer = 0; peer < size_; ++peer)
    if (segment_->header(peer, sequence_ & 1).payload[0] == 0) return false;
  return true;
}

}  // namespace ferro
