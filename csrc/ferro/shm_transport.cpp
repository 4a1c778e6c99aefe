// Headers and waiting; the collectives themselves are in shm_collectives.cpp.
#include "ferro/shm_transport.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "ferro/cache_lines.hpp"
#include "ferro/clock.hpp"
#include "ferro/fingerprint.hpp"
#include "ferro/kernels.hpp"
#include "ferro/pages.hpp"
#include "ferro/shm_cost.hpp"

namespace ferro {

// What a header carries when the input does not fit into it.
struct Places {
  std::uint64_t in;           // in the symmetric heaps, plus one; 0 if it is not there
  std::uint64_t out;          // likewise
  std::uint64_t staged_at;    // in the rank's ring of small payloads
  std::uint64_t address;      // in this rank's own memory
  std::uint64_t out_address;  // the output's, of an allreduce
  std::uint32_t staging_ns;   // how long that took, if it might have been pulled instead
  bool is_staged;             // there
  bool may_be_pulled;         // it can read its peers, and lets them read its arrays
  bool shall_be_pulled_next;  // the next time, if this is the rank that chooses for all: see PullChoice
};
static_assert(sizeof(Places) <= HeaderSlot::kInlineNbytes, "must travel in a header");

namespace {

Places places_of(const HeaderSlot& slot) {
  Places places;
  std::memcpy(&places, slot.payload, sizeof places);
  return places;
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

ShmTransport::ShmTransport(std::shared_ptr<Segment> segment, int index, std::vector<int> members,
                           SpinPolicy spin, bool are_processes, std::shared_ptr<PeerMemory> peer_memory)
    : segment_(std::move(segment)),
      index_(index),
      size_(static_cast<int>(members.size())),
      members_(std::move(members)),
      spin_(spin),
      are_processes_(are_processes),
      peer_memory_(std::move(peer_memory)),
      pull_choice_(peer_memory_->setting(), index_, size_, index_of_),
      sources_(members_.size()),
      outputs_(members_.size()) {
  inputs_.at.resize(members_.size());
  inputs_.output_at.resize(members_.size());
  inputs_.is_foreign.resize(members_.size());
  inputs_.is_output_foreign.resize(members_.size());
  index_of_.assign(*std::max_element(members_.begin(), members_.end()) + 1, -1);
  for (int i = 0; i < size_; ++i) index_of_[members_[i]] = i;
  if (are_processes && size_ > 1) watchdog_ = std::make_unique<Watchdog>(segment_, index_, members_);
}

ShmTransport::~ShmTransport() { close(); }

void ShmTransport::close() noexcept {
  if (segment_->control(index_).has_departed.exchange(1, std::memory_order_seq_cst) != 0) return;
  watchdog_.reset();
  for (int peer = 0; peer < size_; ++peer) {
    for (std::atomic<std::uint32_t>* word :
         {&segment_->collective_sleeper(peer), &segment_->message_sleeper(peer)})
      if (is_parked_for(word->load(std::memory_order_seq_cst), index_)) unpark(*word);
  }
}

void ShmTransport::abort(AbortReason reason) noexcept { segment_->abort(reason); }

AbortReason ShmTransport::aborted() const noexcept {
  return AbortReason::unpack(segment_->abort_word().load(std::memory_order_acquire));
}

void ShmTransport::add_lost(RankSet& ranks) {
  for (int peer = 0; peer < size_; ++peer) {
    const RankControl& control = segment_->control(peer);
    if (control.is_dead() || control.has_left()) ranks.set(static_cast<std::size_t>(members_[peer]));
  }
}

std::uint32_t ShmTransport::succession() const noexcept {
  return segment_->succession_word().load(std::memory_order_acquire);
}

bool ShmTransport::advance_succession(std::uint32_t from, std::uint32_t to) noexcept {
  // acq_rel: whoever loses sees what the winner did before.
  return segment_->succession_word().compare_exchange_strong(from, to, std::memory_order_acq_rel);
}

void ShmTransport::run(Call& call, const Collective& collective) {
  if (collective.nbytes() > shm_cost::kBriefNbytes) call.begin_blocking();
  if (attempt(call, collective)) return;
  // A rank could not read where it stands what another had lent. The inputs are still as they were.
  looks_before_lending_ = true;
  lends_ = false;
  attempt(call, collective);
  lends_ = true;
}

// False, on all ranks, if some rank could not read what it should have pulled.
bool ShmTransport::attempt(Call& call, const Collective& collective) {
  check_group();
  publish_header(collective);
  prepare_next_small();
  await_headers(call);
  // All ranks have read what stood in the slot that this one fills next. Where the slot takes the whole
  // input, peers wait for the store to it, and their caches still hold the line.
  if (is_inline_) prepare_to_write(&segment_->header(index_, (sequence_ + 1) & 1));
  find_inputs(collective);
  const bool is_timed = pull_choice_.is_chooser(collective);
  const auto start = is_timed ? Clock::now() : Clock::time_point{};
  dispatch(call, collective);
  if (inputs_.are_borrowed) {
    fence(call, collective.nbytes());
    // A rank that gave up in the fence may have changed its array while it was still being read, but has
    // ended the group before that.
    check_group();
    if (inputs_.are_pulled && !have_all_read()) return false;
  }
  // Symmetric arrays were neither pulled nor staged.
  if (is_timed && (inputs_.are_pulled || !inputs_.are_borrowed))
    pull_choice_.note(collective, inputs_.are_pulled,
                      Clock::now() - start + std::chrono::nanoseconds(inputs_.staging_ns));
  return true;
}

// ---- Headers ---------------------------------------------------------------

void ShmTransport::publish_header(const Collective& collective) {
  const unsigned parity = ++sequence_ & 1;
  HeaderSlot& slot = segment_->header(index_, parity);
  if (is_uneven(collective)) {
    publish_counts(collective, slot);
  } else {
    publish_input(collective, slot);
  }
  // Made where it stays: a copy would wait until all the fields of the original are in the cache.
  const auto* fingerprint = new (&segment_->control(index_).fingerprints[parity])
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
  const std::size_t at = place_of_small(nbytes);
  next_small_ = at + round_up(nbytes, kLinePair);
  return at;
}

std::size_t ShmTransport::place_of_small(std::size_t nbytes) const {
  return next_small_ + nbytes <= segment_->layout().small_ring_nbytes ? next_small_ : 0;
}

// Fetches the lines that the next payload will be written to if it is as large as this one. Called where
// this rank would only wait.
void ShmTransport::prepare_next_small() {
  const std::size_t nbytes = std::exchange(small_nbytes_, 0);
  if (!shm_cost::is_worth_preparing(nbytes) || !staging_.writes_through_caches()) return;
  prepare_to_write(segment_->small_ring(index_) + place_of_small(nbytes), nbytes);
}

// The rows of counts are all that the header of an uneven all_to_all carries.
void ShmTransport::publish_counts(const Collective& collective, HeaderSlot& slot) {
  is_inline_ = false;
  Places places{};
  places.staged_at = next_small(2 * sizeof(std::uint64_t) * static_cast<std::size_t>(size_));
  std::memcpy(slot.payload, &places, sizeof places);
  auto* counts = reinterpret_cast<std::uint64_t*>(segment_->small_ring(index_) + places.staged_at);
  for (int peer = 0; peer < size_; ++peer) {
    counts[peer] = collective.send_counts[peer];
    counts[size_ + peer] = collective.recv_counts[peer];
  }
}

void ShmTransport::publish_input(const Collective& collective, HeaderSlot& slot) {
  const std::size_t nbytes = input_nbytes(collective, size_, is_root(collective));
  // Who gives nothing still says whether it can take what is pulled. So does a rank that reads nobody: its
  // peers, which may not know that, look for the answer.
  is_inline_ = nbytes <= HeaderSlot::kInlineNbytes && collective.nbytes() < shm_cost::kPullNbytes;
  if (is_inline_) {
    if (nbytes != 0) std::memcpy(slot.payload, collective.in, nbytes);
    return;
  }
  Places places{};
  // An all_to_all in place overwrites what peers would still be reading.
  const bool is_readable_in_place = collective.op != Op::all_to_all || collective.in != collective.out;
  const std::size_t least_nbytes = collective.op == Op::broadcast
                                       ? shm_cost::symmetric_broadcast_nbytes(size_)
                                       : shm_cost::kSymmetricNbytes;
  if (nbytes >= least_nbytes && is_readable_in_place) {
    places.in = segment_->symmetric_offset(collective.in, nbytes);
    places.out = segment_->symmetric_offset(collective.out, nbytes);
  }
  if (pull_choice_.is_open(collective)) {
    if (lends_ && pull_choice_.is_pulled(collective) && peer_memory_->can_read_all())
      offer_to_lend(collective, nbytes, places);
    places.shall_be_pulled_next =
        pull_choice_.is_chooser(collective) && pull_choice_.shall_pull_next(collective);
  }
  if (places.in == 0 && !places.may_be_pulled && nbytes != 0 && nbytes <= segment_->layout().small_nbytes &&
      size_ > 1)
    stage_small(collective, nbytes, places);
  std::memcpy(slot.payload, &places, sizeof places);
}

void ShmTransport::stage_small(const Collective& collective, std::size_t nbytes, Places& places) {
  const std::int64_t start_ns = pull_choice_.is_open(collective) ? now_ns() : 0;
  places.staged_at = next_small(nbytes);
  places.is_staged = true;
  small_nbytes_ = nbytes;
  unsigned char* const staged = segment_->small_ring(index_) + places.staged_at;
  staging_.copy(staged, collective.in, nbytes);
  if (shm_cost::is_worth_handing_over(nbytes)) hand_over(staged, nbytes);
  if (start_ns != 0)
    places.staging_ns = static_cast<std::uint32_t>(std::min<std::int64_t>(now_ns() - start_ns, UINT32_MAX));
}

// Says where peers may read this rank's arrays in its own memory.
void ShmTransport::offer_to_lend(const Collective& collective, std::size_t nbytes, Places& places) {
  places.address = reinterpret_cast<std::uintptr_t>(collective.in);
  places.out_address = reinterpret_cast<std::uintptr_t>(collective.out);
  places.may_be_pulled = nbytes == 0 || places.in != 0 || may_lend(collective, collective.in, nbytes);
  const bool is_output_read = collective.op == Op::allreduce && !shm_cost::pulling_whole_wins(nbytes, size_);
  if (is_output_read && collective.in != collective.out && places.out == 0)
    places.may_be_pulled = places.may_be_pulled && may_lend(collective, collective.out, nbytes);
}

// Looking costs a microsecond or two, as the pages that are looked at are what peers read next.
bool ShmTransport::may_lend(const Collective& collective, const void* data, std::size_t nbytes) const {
  const bool must_look = looks_before_lending_ || !keeps_inputs(collective);
  return !must_look || peer_memory_->can_lend(data, nbytes);
}

void ShmTransport::await_headers(Call& call) {
  const unsigned parity = sequence_ & 1;
  bool is_agreed = true;
  for (int peer = 0; peer < size_; ++peer) {
    const std::atomic<std::uint64_t>& flag = segment_->header(peer, parity).flag;
    try {
      await(call, peer,
            [&flag, this] { return sequence_of(flag.load(std::memory_order_acquire)) == sequence_; });
    } catch (Error& error) {
      // If the group ended because peers on another host gave up waiting for a rank there, nothing of
      // that is known here.
      const bool is_of_this_host =
          error.peer < 0 || std::find(members_.begin(), members_.end(), error.peer) != members_.end();
      if (error.code != ErrorCode::timeout || !is_of_this_host) throw;
      RankSet missing;
      add_awaited(missing);
      error.missing = ranks_of(missing);
      throw;
    }
    is_agreed &= flag.load(std::memory_order_relaxed) == own_flag_;
  }
  if (!is_agreed) check_fingerprints();
}

// The same two ranks are named on every rank: the first, and the first that differs from it.
void ShmTransport::check_fingerprints() const {
  const unsigned parity = sequence_ & 1;
  const Fingerprint& first = segment_->control(0).fingerprints[parity];
  for (int peer = 1; peer < size_; ++peer) {
    const Fingerprint& other = segment_->control(peer).fingerprints[parity];
    if (other != first) throw mismatch_error(members_[index_], members_[0], first, members_[peer], other);
  }
}

// The rows that a rank published: what it sends to each, then what it expects from each.
const std::uint64_t* ShmTransport::counts_of(int index) const {
  const Places places = places_of(segment_->header(index, sequence_ & 1));
  return reinterpret_cast<const std::uint64_t*>(segment_->small_ring(index) + places.staged_at);
}

void ShmTransport::check_counts() const {
  for (int src = 0; src < size_; ++src) {
    const std::uint64_t* sent = counts_of(src);
    for (int dst = 0; dst < size_; ++dst) {
      const std::uint64_t* received = counts_of(dst) + size_;
      if (sent[dst] == received[src]) continue;
      throw Error(ErrorCode::mismatch, members_[index_ == src ? dst : src],
                  "rank " + std::to_string(members_[src]) + " sends " + elements(sent[dst]) + " to rank " +
                      std::to_string(members_[dst]) + ", which expects " + std::to_string(received[src]));
    }
  }
}

void ShmTransport::find_inputs(const Collective& collective) {
  inputs_.reset();
  inputs_.are_kept = keeps_inputs(collective);
  inputs_.are_symmetric = size_ > 1;  // a rank that is alone reads nobody's
  if (is_uneven(collective)) return check_counts();
  if (input_nbytes(collective, size_, true) <= HeaderSlot::kInlineNbytes)
    return find_inline_inputs(collective);

  const bool is_pulled = agree_to_pull(collective);
  const unsigned parity = sequence_ & 1;
  const int root = has_root(collective.op) ? index_of_[collective.root] : -1;
  for (int peer = 0; peer < size_; ++peer) {
    const std::size_t nbytes = input_nbytes(collective, size_, peer == root);
    const HeaderSlot& slot = segment_->header(peer, parity);
    const unsigned char*& input = inputs_.at[peer];
    if (nbytes <= HeaderSlot::kInlineNbytes) {
      input = slot.payload;
      inputs_.are_symmetric = false;
      continue;
    }
    const Places places = places_of(slot);
    inputs_.are_symmetric &= places.in != 0 && places.out != 0;
    if (places.in != 0) {
      input = segment_->symmetric_pointer(places.in);
      find_output(peer, places.out, places.out_address);
      inputs_.are_borrowed = size_ > 1;
    } else if (places.is_staged) {
      input = segment_->small_ring(peer) + places.staged_at;
      inputs_.staging_ns = std::max(inputs_.staging_ns, places.staging_ns);
    } else if (is_pulled) {
      input = reinterpret_cast<const unsigned char*>(static_cast<std::uintptr_t>(places.address));
      inputs_.is_foreign[peer] = peer != index_;
      find_output(peer, places.out, places.out_address);
      inputs_.are_borrowed = inputs_.are_pulled = true;
    } else {
      input = nullptr;
      inputs_.are_complete &= size_ == 1;
    }
  }
  // An allreduce reads symmetric memory only if it can write its results there, too.
  if (collective.op == Op::allreduce && !inputs_.are_symmetric && !inputs_.are_pulled)
    inputs_.are_complete &= !inputs_.are_borrowed;
  inputs_.are_borrowed &= inputs_.are_complete;
  inputs_.at[index_] = static_cast<const unsigned char*>(collective.in);
}

// The same where every header carries all that its rank gives.
void ShmTransport::find_inline_inputs(const Collective& collective) {
  const unsigned parity = sequence_ & 1;
  for (int peer = 0; peer < size_; ++peer) inputs_.at[peer] = segment_->header(peer, parity).payload;
  inputs_.at[index_] = static_cast<const unsigned char*>(collective.in);
  inputs_.are_symmetric = false;
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
    if (peer != index_) peer_memory_->can_read(peer);
  const unsigned parity = sequence_ & 1;
  const int chooser = pull_choice_.chooser_of(collective);
  pull_choice_.set_pulled(collective, places_of(segment_->header(chooser, parity)).shall_be_pulled_next);
  for (int peer = 0; peer < size_; ++peer)
    if (!places_of(segment_->header(peer, parity)).may_be_pulled) return false;
  return true;
}

void ShmTransport::fence(Call& call, std::size_t nbytes) {
  read_nbytes_ = nbytes;
  segment_->header(index_, (sequence_ + 1) & 1).payload[0] = inputs_.were_read;
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

// ---- Waiting ---------------------------------------------------------------

template <class Ready>
void ShmTransport::await(Call& call, int peer, Ready ready) {
  for (int i = 0; i < SpinPolicy::kBriefPauses; ++i) {
    if (ready()) return;
    pause_briefly();
  }
  await_slowly(call, peer, ready);
}

template <class Ready>
__attribute__((noinline)) void ShmTransport::await_slowly(Call& call, int peer, Ready ready) {
  call.begin_blocking();
  awaited_.store(flag_of(sequence_, static_cast<std::uint32_t>(peer)), std::memory_order_relaxed);
  if (!spin(ready)) sleep(call, peer, ready);
  // Not before: as long as we wait, others read here for whom.
  awaited_.store(kNobody, std::memory_order_relaxed);
}

// Whether it was ready before it was time to sleep.
template <class Ready>
bool ShmTransport::spin(Ready ready) const {
  const SpinPolicy patience = spin_.while_moving(read_nbytes_);
  for (int turn = 0; !ready(); ++turn)
    if (!patience.linger(turn)) return false;
  return true;
}

template <class Ready>
void ShmTransport::sleep(Call& call, int peer, Ready ready) {
  std::atomic<std::uint32_t>& word = segment_->collective_sleeper(index_);
  std::atomic<std::uint32_t>& stuck_for = segment_->control(index_).stuck_for;
  const bool is_stuck = holds_up_rank(call);
  if (is_stuck) stuck_for.store(static_cast<std::uint32_t>(peer) + 1, std::memory_order_relaxed);
  while (!ready()) {
    if (is_lost(peer)) {
      if (ready()) break;  // what a peer published before it departed counts
      throw_lost(peer);
    }
    check_caller(call, peer);
    word.store(static_cast<std::uint32_t>(peer) + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!ready() && !is_lost(peer)) futex_wait(word, static_cast<std::uint32_t>(peer) + 1, call.slice_s());
  }
  word.store(kAwake, std::memory_order_relaxed);
  if (is_stuck) stuck_for.store(kAwake, std::memory_order_relaxed);
}

bool ShmTransport::is_lost(int peer) const {
  return aborted().is_set() || segment_->control(peer).has_left();
}

void ShmTransport::throw_lost(int peer) const {
  check_group();
  throw Error(ErrorCode::channel_closed, members_[peer]);
}

void ShmTransport::check_caller(Call& call, int peer) const {
  call.check_interrupt();
  if (!call.is_expired()) return;
  Error error(ErrorCode::timeout, members_[culprit_behind(peer)]);
  error.missing = {error.peer};
  throw error;
}

// Where no peer ever keeps this rank waiting, only this ends a call that must not go on.
void ShmTransport::check_at_work(Call& call) const {
  check_group();
  call.check_at_work();
}

void ShmTransport::check_group() const { aborted().throw_if_set(); }

// Called after a sequentially consistent store, which is the publisher's fence of parking.hpp.
// Reads one cache line for every 16 ranks, which changes only when somebody sleeps.
void ShmTransport::wake_sleepers() {
  for (int peer = 0; peer < size_; ++peer) {
    std::atomic<std::uint32_t>& word = segment_->collective_sleeper(peer);
    if (is_parked_for(word.load(std::memory_order_seq_cst), index_)) unpark(word);
  }
}

void ShmTransport::await_counter(Call& call, int peer, std::atomic<std::uint64_t> RankControl::* counter,
                                 std::uint64_t value) {
  const std::atomic<std::uint64_t>& word = segment_->control(peer).*counter;
  await(call, peer, [&word, value] { return word.load(std::memory_order_acquire) >= value; });
}

void ShmTransport::advance(std::atomic<std::uint64_t> RankControl::* counter, std::uint64_t value) {
  (segment_->control(index_).*counter).store(value, std::memory_order_seq_cst);
  wake_sleepers();
}

}  // namespace ferro
