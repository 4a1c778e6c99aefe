// Messages between two ranks, puts and signals.
//
// A message goes through the channel of its pair of ranks, piece by piece: the sender
// fills it when it is empty, the receiver empties it. The sender is done when the last
// piece has been taken, never before: two ranks that both send first and receive afterwards
// wait for ever unless they group, as with a real NCCL, which does not promise to buffer.
#include <algorithm>
#include <cstring>
#include <map>

#include "emulation/nccl/element.hpp"
#include "emulation/nccl/operation.hpp"

namespace emulation {
namespace {

class Transfer {
 public:
  Transfer(Communicator& communicator, const Operation& operation)
      : communicator_(communicator),
        segment_(communicator.segment()),
        operation_(operation),
        is_send_(operation.kind == Kind::send),
        channel_(is_send_ ? segment_.message(communicator.rank, operation.peer)
                          : segment_.message(operation.peer, communicator.rank)),
        nbytes_(operation.count * element_nbytes(operation.dtype)) {}

  bool is_done() const { return is_done_; }
  // Whether the next step can be made now, and the step.
  bool can_step() const {
    const std::uint32_t state = channel_.state.load(std::memory_order_acquire);
    return is_send_ ? state != Channel::kFull : state == Channel::kFull;
  }
  void step() { is_send_ ? step_send() : step_recv(); }

 private:
  void step_send();
  void step_recv();
  void hand_over(Channel::State state) {
    channel_.state.store(state, std::memory_order_release);
    segment_.ring();
  }

  Communicator& communicator_;
  Segment& segment_;
  const Operation& operation_;
  const bool is_send_;
  Channel& channel_;
  const std::size_t nbytes_;
  std::size_t at_ = 0;
  bool has_begun_ = false;
  bool is_done_ = false;
};

void Transfer::step_send() {
  if (channel_.state.load(std::memory_order_acquire) == Channel::kRefused) {
    channel_.state.store(Channel::kEmpty, std::memory_order_release);
    fail(ncclInvalidArgument, "rank ", operation_.peer, " expected another message than the ",
         operation_.count, " elements of ", name_of(operation_.dtype), " that rank ", communicator_.rank,
         " sent");
  }
  if (has_begun_ && at_ == nbytes_) {
    is_done_ = true;  // empty again: the last piece was taken
    return;
  }
  const std::size_t n = std::min(nbytes_ - at_, kChannelNbytes);
  channel_.dtype = static_cast<std::uint32_t>(operation_.dtype);
  channel_.total_nbytes = nbytes_;
  channel_.nbytes = static_cast<std::uint32_t>(n);
  if (n > 0) std::memcpy(channel_.data, static_cast<const char*>(operation_.in) + at_, n);
  at_ += n;
  has_begun_ = true;
  hand_over(Channel::kFull);
}

void Transfer::step_recv() {
  if (channel_.total_nbytes != nbytes_ || channel_.dtype != static_cast<std::uint32_t>(operation_.dtype)) {
    std::ostringstream text;
    const auto dtype = static_cast<ncclDataType_t>(channel_.dtype);
    text << "rank " << communicator_.rank << " expected " << operation_.count << " elements of "
         << name_of(operation_.dtype) << " from rank " << operation_.peer << ", which sent "
         << channel_.total_nbytes / element_nbytes(dtype) << " of " << name_of(dtype);
    hand_over(Channel::kRefused);
    complain(text.str());
    fail(ncclInvalidArgument, text.str());
  }
  const std::size_t n = channel_.nbytes;
  if (n > 0) std::memcpy(static_cast<char*>(operation_.out) + at_, channel_.data, n);
  at_ += n;
  is_done_ = at_ == nbytes_;
  hand_over(Channel::kEmpty);
}

// The transfers of one direction of one pair of ranks, in the order of their calls.
struct Lineup {
  std::vector<Transfer> transfers;
  std::size_t next = 0;
  bool is_done() const { return next == transfers.size(); }
};

}  // namespace

void run_transfers(Communicator& communicator, const std::vector<const Operation*>& operations) {
  std::map<std::pair<bool, int>, Lineup> lineups;
  for (const Operation* operation : operations) {
    lineups[{operation->kind == Kind::send, operation->peer}].transfers.emplace_back(communicator,
                                                                                     *operation);
  }
  const auto is_any = [&](auto predicate) {
    return std::any_of(lineups.begin(), lineups.end(), [&](auto& entry) { return predicate(entry.second); });
  };
  const auto can_step = [](const Lineup& lineup) {
    return !lineup.is_done() && lineup.transfers[lineup.next].can_step();
  };
  while (is_any([](const Lineup& lineup) { return !lineup.is_done(); })) {
    communicator.segment().await([&] { return is_any(can_step); }, communicator.operations_stop());
    for (auto& [key, lineup] : lineups) {
      if (!can_step(lineup)) continue;
      lineup.transfers[lineup.next].step();
      if (lineup.transfers[lineup.next].is_done()) ++lineup.next;
    }
  }
}

void run_put(Communicator& communicator, const Operation& operation) {
  Segment& segment = communicator.segment();
  Channel& channel = segment.put(communicator.rank, operation.peer);
  const auto is_empty = [&] { return channel.state.load(std::memory_order_acquire) == Channel::kEmpty; };
  const std::size_t nbytes = operation.count * element_nbytes(operation.dtype);
  for (std::size_t at = 0; at < nbytes || nbytes == 0; at += kChannelNbytes) {
    segment.await(is_empty, communicator.operations_stop());
    const std::size_t n = std::min(nbytes - at, kChannelNbytes);
    channel.window = operation.target->number;
    channel.offset = operation.offset + at;
    channel.nbytes = static_cast<std::uint32_t>(n);
    channel.is_last = at + n == nbytes ? 1 : 0;
    channel.signal_index = static_cast<std::uint32_t>(operation.signal_index);
    channel.signal_context = static_cast<std::uint32_t>(operation.signal_context);
    if (n > 0) std::memcpy(channel.data, static_cast<const char*>(operation.in) + at, n);
    channel.state.store(Channel::kFull, std::memory_order_release);
    segment.ring();
    if (nbytes == 0) break;
  }
  // The data is in place when the operation ends: what follows in the stream may rely on it.
  segment.await(is_empty, communicator.operations_stop());
}

void run_signal(Communicator& communicator, const Operation& operation) {
  Segment& segment = communicator.segment();
  segment.signals(operation.peer, communicator.rank, operation.signal_index, operation.signal_context)
      .fetch_add(1, std::memory_order_release);
  segment.ring();
}

void run_wait_signal(Communicator& communicator, const Operation& operation) {
  Segment& segment = communicator.segment();
  for (const ncclWaitSignalDesc_t& awaited : operation.awaited) {
    const std::uint64_t key = (static_cast<std::uint64_t>(awaited.peer) << 32) |
                              static_cast<std::uint64_t>(awaited.sigIdx << 8 | awaited.ctx);
    std::uint32_t& consumed = communicator.consumed_signals[key];
    const std::uint32_t goal = consumed + static_cast<std::uint32_t>(awaited.opCnt);
    std::atomic<std::uint32_t>& given =
        segment.signals(communicator.rank, awaited.peer, awaited.sigIdx, awaited.ctx);
    segment.await(
        [&] { return static_cast<std::int32_t>(given.load(std::memory_order_acquire) - goal) >= 0; },
        communicator.operations_stop());
    consumed = goal;
  }
}

}  // namespace emulation
