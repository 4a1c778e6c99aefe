// Runs collectives, and waits. The headers are in shm_headers.cpp, the steps in shm_collectives.cpp.
#include "ferro/shm_transport.hpp"

#include <algorithm>
#include <utility>

#include "ferro/cache_lines.hpp"
#include "ferro/clock.hpp"
#include "ferro/shm_cost.hpp"

namespace ferro {

namespace {

// About as long as it takes to wake a thread, which is what a rank saves that waits no longer.
constexpr int kWakingPauses = 10 * SpinPolicy::kBriefPauses;

}  // namespace

ShmTransport::ShmTransport(std::shared_ptr<Segment> segment, int place, std::vector<int> members,
                           SpinPolicy spin, bool are_processes, std::shared_ptr<PeerMemory> peer_memory)
    : segment_(std::move(segment)),
      place_(place),
      size_(static_cast<int>(members.size())),
      members_(std::move(members)),
      spin_(spin),
      are_processes_(are_processes),
      peer_memory_(std::move(peer_memory)),
      pull_choice_(peer_memory_->setting(), place_, size_, place_of_),
      sources_(members_.size()),
      outputs_(members_.size()) {
  inputs_.at.resize(members_.size());
  inputs_.output_at.resize(members_.size());
  inputs_.is_foreign.resize(members_.size());
  inputs_.is_output_foreign.resize(members_.size());
  place_of_.assign(*std::max_element(members_.begin(), members_.end()) + 1, -1);
  for (int i = 0; i < size_; ++i) place_of_[members_[i]] = i;
  if (are_processes && size_ > 1) watchdog_ = std::make_unique<Watchdog>(segment_, place_, members_);
}

ShmTransport::~ShmTransport() { close(); }

void ShmTransport::close() noexcept {
  if (segment_->control(place_).has_departed.exchange(1, std::memory_order_seq_cst) != 0) return;
  watchdog_.reset();
  for (int peer = 0; peer < size_; ++peer) {
    for (std::atomic<std::uint32_t>* word :
         {&segment_->collective_sleeper(peer), &segment_->message_sleeper(peer)})
      if (is_parked_for(word->load(std::memory_order_seq_cst), place_)) unpark(*word);
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
  if (has_begun_) {
    has_begun_ = false;
  } else {
    check_group();
    publish_header(collective);
    prepare_next_small();
  }
  await_headers(call);
  // All ranks have read what stood in the slot that this one fills next. Where the slot takes the whole
  // input, peers wait for the store to it, and their caches still hold the line.
  if (is_inline_) prepare_to_write(&segment_->header(place_, (sequence_ + 1) & 1));
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
  // Symmetric arrays were neither pulled nor staged, and some must be staged.
  if (is_timed && inputs_.is_choice_open && (inputs_.are_pulled || !inputs_.are_borrowed))
    pull_choice_.note(collective, inputs_.are_pulled,
                      Clock::now() - start + std::chrono::nanoseconds(inputs_.staging_ns));
  return true;
}

bool ShmTransport::have_all_begun() const {
  for (int peer = 0; peer < size_; ++peer) {
    const std::uint64_t flag = segment_->header(peer, sequence_ & 1).flag.load(std::memory_order_acquire);
    if (sequence_of(flag) != sequence_) return false;
    // A rank that has begun something else stages nothing.
    if (may_lack_inputs_ && flag == own_flag_ && is_input_symmetric(peer) &&
        segment_->control(peer).staged.load(std::memory_order_acquire) < count_after(0))
      return false;
  }
  return true;
}

bool ShmTransport::linger_until_all_have_begun(Call* call) const {
  const int num_pauses = call != nullptr ? SpinPolicy::kBriefPauses : std::min(kWakingPauses, spin_.pauses);
  for (int i = 0; i < num_pauses; ++i) {
    if (have_all_begun()) return true;
    pause_briefly();
  }
  if (call == nullptr) return false;
  call->begin_blocking();
  return spin([this] { return have_all_begun(); });
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
  std::atomic<std::uint32_t>& word = segment_->collective_sleeper(place_);
  note_waiting_for_collective(call, true);
  while (!ready()) {
    if (is_lost(peer)) {
      if (ready()) break;  // what a peer published before it departed counts
      throw_lost(peer);
    }
    check_caller(call, peer);
    word.store(parked_for(peer), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!ready() && !is_lost(peer)) futex_wait(word, parked_for(peer), call.slice_s());
  }
  word.store(kAwake, std::memory_order_relaxed);
  note_waiting_for_collective(call, false);
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

// For work between waits. In a call that never has to wait for a peer, nothing else notices the end of the
// group, the deadline or a signal.
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
    if (is_parked_for(word.load(std::memory_order_seq_cst), place_)) unpark(word);
  }
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

void ShmTransport::await_counter(Call& call, int peer, std::atomic<std::uint64_t> RankControl::* counter,
                                 std::uint64_t value) {
  const std::atomic<std::uint64_t>& word = segment_->control(peer).*counter;
  await(call, peer, [&word, value] { return word.load(std::memory_order_acquire) >= value; });
}

void ShmTransport::advance(std::atomic<std::uint64_t> RankControl::* counter, std::uint64_t value) {
  (segment_->control(place_).*counter).store(value, std::memory_order_seq_cst);
  wake_sleepers();
}

}  // namespace ferro
