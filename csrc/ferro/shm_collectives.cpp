// The collectives of ShmTransport. When one of these runs, every rank has
// published its header and all agree; inputs_ says what can be read in place.
//
// Small inputs came with the headers: one step, reading only. Symmetric inputs are read where
// they stand, followed by a fence; so may large ones be in their ranks' own memory (they are pulled),
// unless the root alone reads them. All others go in rounds through the windows: each rank stages a
// piece of its input, then reads those of its peers.
#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "ferro/kernels.hpp"
#include "ferro/passes.hpp"
#include "ferro/shm_cost.hpp"
#include "ferro/shm_transport.hpp"

namespace ferro {
namespace {

// At least this many rounds are in flight, however many pieces a slot has.
constexpr std::size_t kMinSlots = 8;

// How much of all peers' inputs is fetched at a time, so that it is still in the cache when it is reduced.
constexpr std::size_t kFetchedNbytes = std::size_t{512} << 10;
constexpr std::size_t kLeastFetchedNbytes = std::size_t{4} << 10;  // of one peer's

// The clock is read once in this many rounds, which take milliseconds at most.
constexpr std::uint64_t kRoundsPerCheck = 16;
bool is_check_due(std::uint64_t turn) { return (turn + 1) % kRoundsPerCheck == 0; }

const unsigned char* bytes(const void* data) { return static_cast<const unsigned char*>(data); }
unsigned char* bytes(void* data) { return static_cast<unsigned char*>(data); }

// Copies a part of an output of `output_nbytes`: onto itself, perhaps, where the collective is in place.
void copy_part(void* dst, const void* src, std::size_t nbytes, std::size_t output_nbytes) {
  if (nbytes != 0 && dst != src) copy_to_user(dst, src, nbytes, output_nbytes);
}

std::size_t ceil_div(std::size_t n, std::size_t d) { return (n + d - 1) / d; }

// The share of `place` among `size` in `whole`: whole cache lines, so that no
// two ranks write to the same one.
Range share_of(Range whole, int size, int place, std::size_t itemsize) {
  const std::size_t line = std::max<std::size_t>(1, kCacheLine / itemsize);
  const std::size_t share = ceil_div(ceil_div(whole.count, size), line) * line;
  const std::size_t begin = std::min(whole.count, share * place);
  return {whole.first + begin, std::min(whole.count, begin + share) - begin};
}

// `count` elements in rounds of equal size, at most `most` elements each.
class Rounds {
 public:
  Rounds(std::size_t count, std::size_t most) : count_(count) {
    if (count == 0) return;
    per_round_ = std::min(most, ceil_div(ceil_div(count, ceil_div(count, most)), kCacheLine) * kCacheLine);
  }
  std::uint64_t number() const { return count_ == 0 ? 0 : ceil_div(count_, per_round_); }
  Range operator[](std::uint64_t round) const {
    const std::size_t first = std::min<std::size_t>(count_, round * per_round_);
    return {first, std::min(count_ - first, per_round_)};
  }

 private:
  std::size_t count_;
  std::size_t per_round_ = 0;
};

// Where a reduction in two shots keeps a round: in one slot of each rank's window, which has a piece for each
// rank's share, and one of each rank's results, which has room for the one share that this rank reduces.
struct TwoShotSlots {
  static constexpr std::uint64_t kNumber = SegmentLayout::kRoundSlots;

  TwoShotSlots(Segment& segment, int size, std::uint64_t first_round)
      : segment(segment),
        first_round(first_round),
        nbytes(segment.layout().window_nbytes / kNumber),
        piece_nbytes(nbytes / size / kLinePair * kLinePair) {}

  unsigned char* staged_at(int place, std::uint64_t round, int share_owner) const {
    return segment.window(place) + (first_round + round) % kNumber * nbytes + share_owner * piece_nbytes;
  }
  unsigned char* result_at(int place, std::uint64_t round) const {
    return segment.results(place) + (first_round + round) % kNumber * piece_nbytes;
  }

  Segment& segment;
  const std::uint64_t first_round;
  const std::size_t nbytes, piece_nbytes;
};

}  // namespace

void ShmTransport::dispatch(Call& call, const Collective& collective) {
  switch (collective.op) {
    case Op::allreduce:
      return allreduce(call, collective);
    case Op::broadcast:
      return broadcast(call, collective);
    case Op::reduce:
      return reduce(call, collective);
    case Op::all_gather:
    case Op::split:
      return all_gather(call, collective);
    case Op::reduce_scatter:
      return reduce_scatter(call, collective);
    case Op::all_to_all:
      return is_uneven(collective) ? all_to_all_uneven(call, collective) : all_to_all(call, collective);
    case Op::gather:
      return gather(call, collective);
    case Op::scatter:
      return scatter(call, collective);
    default:
      return;  // a barrier is its headers
  }
}

template <class Work>
void ShmTransport::work_in_passes(Call& call, std::size_t count, std::size_t nbytes_each, Work work) const {
  in_passes(count, nbytes_each, [&] { check_at_work(call); }, work);
}

// dst = elements [first, first + count) of every rank's input, reduced in rank order.
// `output_nbytes` is the size of the whole output if nobody reads it soon, else 0.
void ShmTransport::reduce_inputs(const Collective& c, void* dst, std::size_t first, std::size_t count,
                                 std::size_t output_nbytes) const {
  const std::size_t offset = first * item_size(c.dtype);
  for (int peer = 0; peer < size_; ++peer) sources_[peer] = inputs_.at[peer] + offset;
  reduce_kernel(c.dtype, c.reduce_op, output_nbytes)(dst, sources_.data(), size_, count,
                                                     divisor_of(c.reduce_op, size_));
}

void ShmTransport::reduce_in_passes(Call& call, const Collective& c, void* dst, Range range) {
  const std::size_t itemsize = item_size(c.dtype);
  if (size_ == 1)
    return copy_block(call, dst, c.in, range.count * itemsize, range.count * itemsize);  // nothing, in place
  work_in_passes(call, range.count, itemsize * static_cast<std::size_t>(size_ + 1), [&](Range part) {
    unsigned char* const out = bytes(dst) + part.first * itemsize;
    if (inputs_.are_pulled) {
      reduce_foreign(c, out, {range.first + part.first, part.count});
    } else {
      reduce_inputs(c, out, range.first + part.first, part.count);
    }
  });
}

// Fetches inputs from the memory of other processes block by block, to reduce them from the cache.
void ShmTransport::reduce_foreign(const Collective& c, void* dst, Range range) {
  const std::size_t itemsize = item_size(c.dtype);
  const auto num_peers = static_cast<std::size_t>(size_ - 1);
  const std::size_t block_nbytes =
      std::max(kLeastFetchedNbytes, kFetchedNbytes / num_peers / kLinePair * kLinePair);
  char* const fetched = fetched_.reserve(block_nbytes * num_peers);
  const Rounds blocks(range.count, block_nbytes / itemsize);
  for (std::uint64_t i = 0; i < blocks.number(); ++i) {
    const Range block = blocks[i];
    const std::size_t offset = (range.first + block.first) * itemsize;
    char* room = fetched;
    for (int peer = 0; peer < size_; ++peer) {
      sources_[peer] = inputs_.at[peer] + offset;
      if (!inputs_.is_foreign[peer]) continue;
      pull(peer, room, sources_[peer], block.count * itemsize);
      sources_[peer] = room;
      room += block_nbytes;
    }
    reduce_kernel(c.dtype, c.reduce_op, 0)(bytes(dst) + block.first * itemsize, sources_.data(), size_,
                                           block.count, divisor_of(c.reduce_op, size_));
  }
}

void ShmTransport::pull(int peer, void* dst, const void* src, std::size_t nbytes) {
  const int error = peer_memory_->read(peer, dst, src, nbytes);
  if (error != 0 && !inputs_.are_kept) throw_unreadable(peer, error);
  inputs_.were_read &= error == 0;
}

void ShmTransport::copy_block(Call& call, void* dst, const void* src, std::size_t nbytes,
                              std::size_t output_nbytes) const {
  work_in_passes(call, nbytes, 2, [&](Range range) {
    copy_part(bytes(dst) + range.first, bytes(src) + range.first, range.count, output_nbytes);
  });
}

void ShmTransport::copy_from(Call& call, int peer, bool is_foreign, void* dst, const void* src,
                             std::size_t nbytes, std::size_t output_nbytes) {
  if (!is_foreign) return copy_block(call, dst, src, nbytes, output_nbytes);
  work_in_passes(call, nbytes, 2, [&](Range range) {
    pull(peer, bytes(dst) + range.first, bytes(src) + range.first, range.count);
  });
}

// A process that is ending may have no memory left to read before the kernel has marked it as dead:
// its main thread may go first.
void ShmTransport::throw_unreadable(int peer, int error) const {
  check_group();
  if (segment_->control(peer).is_dead() || error == ESRCH) throw Error(ErrorCode::peer_lost, members_[peer]);
  throw Error(ErrorCode::io, members_[peer],
              "cannot read the array of rank " + std::to_string(members_[peer]) + ": " +
                  std::generic_category().message(error));
}

ShmTransport::Slots ShmTransport::slots_for(std::size_t nbytes, int num_pieces) const {
  const std::size_t window = segment_->layout().window_nbytes;
  const auto pieces = static_cast<std::size_t>(std::max(1, num_pieces));
  const std::size_t largest = window / kMinSlots / pieces / kLinePair * kLinePair;
  const std::size_t piece = std::min(shm_cost::piece_nbytes(nbytes), largest);
  return {piece, piece * pieces, window / (piece * pieces)};
}

template <class... Phases>
void ShmTransport::run_phases(Call& call, std::uint64_t num_rounds, Phases... phases) {
  for (std::uint64_t turn = 0; turn < num_rounds + sizeof...(phases) - 1; ++turn) {
    if (is_check_due(turn)) check_at_work(call);
    std::uint64_t behind = 0;
    const auto run_due = [&](auto& phase) {
      if (turn >= behind && turn - behind < num_rounds) phase(turn - behind);
      ++behind;
    };
    (run_due(phases), ...);
  }
  round_ += num_rounds;
}

// Consuming is one round behind staging: peers always have something to read.
//
//     turn     0  1  2  ...  last
//     stage    0  1  2  ...
//     consume     0  1  ...  last - 1
template <class Stage, class Consume>
void ShmTransport::run_rounds(Call& call, std::uint64_t num_rounds, const Slots& slots, Roles roles,
                              Stage stage, Consume consume) {
  const auto slot_of = [&](int place, std::uint64_t round) {
    return segment_->window(place) + (round_ + round) % slots.number * slots.nbytes;
  };
  const auto stage_round = [&](std::uint64_t round) {
    if (!roles.is_producer(place_)) return;
    await_free_slot(call, round, slots.number, roles);
    stage(round, slot_of(place_, round));
    advance(&RankControl::staged, count_after(round));
  };
  const auto consume_round = [&](std::uint64_t round) {
    if (!roles.is_consumer(place_)) return;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == place_ || !roles.is_producer(peer)) continue;
      await_counter(call, peer, &RankControl::staged, count_after(round));
      inputs_.at[peer] = slot_of(peer, round);
    }
    consume(round);
    advance(&RankControl::consumed, count_after(round));
  };
  run_phases(call, num_rounds, stage_round, consume_round);
}

// A slot is free once everybody has consumed the round that was in it. Slots of earlier
// collectives are free: a rank publishes a header only after consuming all before it.
void ShmTransport::await_free_slot(Call& call, std::uint64_t round, std::uint64_t num_slots, Roles roles) {
  if (round < num_slots) return;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == place_ || !roles.is_consumer(peer)) continue;
    await_counter(call, peer, &RankControl::consumed, count_after(round - num_slots));
  }
}

// ---- allreduce and reduce ----------------------------------------------------

void ShmTransport::allreduce(Call& call, const Collective& c) {
  if (!inputs_.are_complete && c.nbytes() <= segment_->layout().small_nbytes) complete_inputs(call, c);
  if (!inputs_.are_complete) {
    if (shm_cost::one_shot_wins(c.nbytes(), size_)) return allreduce_one_shot(call, c);
    return reduce_two_shot(call, c, Roles::kEverybody);
  }
  if (inputs_.are_symmetric) return allreduce_symmetric(call, c);
  if (inputs_.are_pulled && !shm_cost::pulling_whole_wins(c.nbytes(), size_))
    return allreduce_pulled(call, c);
  if (inputs_.are_pulled) return allreduce_pulled_whole(call, c);
  reduce_in_passes(call, c, c.out, {0, c.count});
}

// Where small inputs are in symmetric memory, but not all of them: their ranks stage them after all. The
// others, who may have gone on to something else since they sent their headers, are not waited for.
void ShmTransport::complete_inputs(Call& call, const Collective& c) {
  const Slots slots = slots_for(c.nbytes(), 1);
  const auto slot_of = [&](int place) {
    return segment_->window(place) + round_ % slots.number * slots.nbytes;
  };
  if (is_input_symmetric(place_)) {
    staging_.copy(slot_of(place_), c.in, c.nbytes());
    advance(&RankControl::staged, count_after(0));
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == place_ || !is_input_symmetric(peer)) continue;
    await_counter(call, peer, &RankControl::staged, count_after(0));
    inputs_.at[peer] = slot_of(peer);
  }
  ++round_;
  inputs_.are_complete = true;
}

// Each rank reduces its share from everybody's input into everybody's output.
void ShmTransport::allreduce_symmetric(Call& call, const Collective& c) {
  const std::size_t itemsize = item_size(c.dtype);
  const Range share = share_of({0, c.count}, size_, place_, itemsize);
  const auto reduce_range = [&](Range range) {
    const std::size_t offset = (share.first + range.first) * itemsize;
    for (int peer = 0; peer < size_; ++peer) {
      sources_[peer] = inputs_.at[peer] + offset;
      outputs_[peer] = inputs_.output_at[peer] + offset;
    }
    reduce_to_all(c.dtype, c.reduce_op, outputs_.data(), size_, sources_.data(), size_, range.count,
                  divisor_of(c.reduce_op, size_), c.count * itemsize);
  };
  work_in_passes(call, share.count, itemsize * static_cast<std::size_t>(2 * size_), reduce_range);
}

// Each rank reduces its share from everybody's input, and then takes the others' from their outputs.
void ShmTransport::allreduce_pulled(Call& call, const Collective& c) {
  const std::size_t itemsize = item_size(c.dtype);
  const auto share = [&](int place) { return share_of({0, c.count}, size_, place, itemsize); };
  const Range own = share(place_);
  reduce_in_passes(call, c, bytes(c.out) + own.first * itemsize, own);
  fence(call, own.count * itemsize);
  check_group();
  for (int step = 1; step < size_; ++step) {
    const int peer = (place_ + step) % size_;
    const std::size_t offset = share(peer).first * itemsize;
    copy_from(call, peer, inputs_.is_output_foreign[peer], bytes(c.out) + offset,
              inputs_.output_at[peer] + offset, share(peer).count * itemsize, c.nbytes());
  }
}

// Each rank reduces all of everybody's input, its own share first: none fetches what a peer is just fetching.
void ShmTransport::allreduce_pulled_whole(Call& call, const Collective& c) {
  const std::size_t itemsize = item_size(c.dtype);
  for (int step = 0; step < size_; ++step) {
    const Range part = share_of({0, c.count}, size_, (place_ + step) % size_, itemsize);
    reduce_in_passes(call, c, bytes(c.out) + part.first * itemsize, part);
  }
}

// Each rank stages all of its input and reduces all of everybody's.
void ShmTransport::allreduce_one_shot(Call& call, const Collective& c) {
  const std::size_t itemsize = item_size(c.dtype);
  const Slots slots = slots_for(c.count * itemsize, 1);
  const Rounds rounds(c.count, slots.piece_nbytes / itemsize);
  run_rounds(
      call, rounds.number(), slots, {},
      [&](std::uint64_t round, void* slot) {
        const Range range = rounds[round];
        staging_.copy(slot, bytes(c.in) + range.first * itemsize, range.count * itemsize);
      },
      [&](std::uint64_t round) {
        const Range range = rounds[round];
        inputs_.at[place_] = bytes(c.in) + range.first * itemsize;
        reduce_inputs(c, bytes(c.out) + range.first * itemsize, 0, range.count, c.count * itemsize);
      });
}

// Per round: stage the peers' shares of the input, reduce the own share, collect
// the peers' results. Three phases in kRoundSlots slots: more than the two rounds by
// which ranks may be apart.
//
//     turn      0  1  2  3  ...  last
//     stage     0  1  2  3  ...
//     reduce       0  1  2  ...
//     collect         0  1  ...  last - 2
void ShmTransport::reduce_two_shot(Call& call, const Collective& c, int sole_collector) {
  const std::size_t itemsize = item_size(c.dtype);
  const TwoShotSlots slots(*segment_, size_, round_);
  const Rounds rounds(c.count, slots.piece_nbytes * size_ / itemsize);
  const bool is_collector = sole_collector == Roles::kEverybody || sole_collector == place_;
  const auto share = [&](std::uint64_t round, int place) {
    return share_of(rounds[round], size_, place, itemsize);
  };

  const auto stage = [&](std::uint64_t round) {
    await_free_slot(call, round, slots.kNumber, {});
    for (int peer = 0; peer < size_; ++peer) {
      const Range range = share(round, peer);
      if (peer != place_)
        staging_.copy(slots.staged_at(place_, round, peer), bytes(c.in) + range.first * itemsize,
                      range.count * itemsize);
    }
    advance(&RankControl::staged, count_after(round));
  };
  const auto reduce_share = [&](std::uint64_t round) {
    const Range own = share(round, place_);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != place_) await_counter(call, peer, &RankControl::staged, count_after(round));
      inputs_.at[peer] = slots.staged_at(peer, round, place_);
    }
    inputs_.at[place_] = bytes(c.in) + own.first * itemsize;
    unsigned char* result = slots.result_at(place_, round);
    // A rank that collects needs its own share as well: reduced there, it is copied for the peers.
    unsigned char* reduced = is_collector ? bytes(c.out) + own.first * itemsize : result;
    reduce_inputs(c, reduced, 0, own.count);
    if (reduced != result) staging_.copy(result, reduced, own.count * itemsize);
    advance(&RankControl::reduced, count_after(round));
    if (!is_collector) advance(&RankControl::consumed, count_after(round));
  };
  const auto collect = [&](std::uint64_t round) {
    if (!is_collector) return;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == place_) continue;
      const Range range = share(round, peer);
      await_counter(call, peer, &RankControl::reduced, count_after(round));
      copy_to_user(bytes(c.out) + range.first * itemsize, slots.result_at(peer, round),
                   range.count * itemsize, c.count * itemsize);
    }
    advance(&RankControl::consumed, count_after(round));
  };

  run_phases(call, rounds.number(), stage, reduce_share, collect);
}

void ShmTransport::reduce(Call& call, const Collective& c) {
  if (!inputs_.are_complete) return reduce_two_shot(call, c, place_of_[c.root]);
  if (is_root(c)) reduce_in_passes(call, c, c.out, {0, c.count});
}

void ShmTransport::reduce_scatter(Call& call, const Collective& c) {
  const std::size_t itemsize = item_size(c.dtype);
  if (inputs_.are_complete) return reduce_in_passes(call, c, c.out, {c.count * place_, c.count});
  const Slots slots = slots_for(c.count * itemsize, size_ - 1);
  const Rounds rounds(c.count, slots.piece_nbytes / itemsize);
  run_rounds(
      call, rounds.number(), slots, {},
      [&](std::uint64_t round, unsigned char* slot) {
        const Range range = rounds[round];
        for (int peer = 0; peer < size_; ++peer)
          if (peer != place_)
            staging_.copy(slot + piece_offset(slots, place_, peer),
                          bytes(c.in) + (peer * c.count + range.first) * itemsize, range.count * itemsize);
      },
      [&](std::uint64_t round) {
        const Range range = rounds[round];
        for (int peer = 0; peer < size_; ++peer)
          if (peer != place_) inputs_.at[peer] += piece_offset(slots, peer, place_);
        inputs_.at[place_] = bytes(c.in) + (place_ * c.count + range.first) * itemsize;
        reduce_inputs(c, bytes(c.out) + range.first * itemsize, 0, range.count, c.count * itemsize);
      });
}

// ---- Collectives that only move -----------------------------------------------

void ShmTransport::broadcast(Call& call, const Collective& c) {
  const std::size_t nbytes = c.nbytes();
  const int root = place_of_[c.root];
  if (inputs_.are_complete)
    return copy_from(call, root, inputs_.is_foreign[root], c.out, inputs_.at[root], nbytes, nbytes);
  const Slots slots = slots_for(nbytes, 1);
  const Rounds rounds(nbytes, slots.piece_nbytes);
  run_rounds(
      call, rounds.number(), slots, Roles{root, Roles::kEverybody},
      [&](std::uint64_t round, void* slot) {
        const Range range = rounds[round];
        staging_.copy(slot, bytes(c.in) + range.first, range.count);
        // Now, while it is in the cache.
        copy_part(bytes(c.out) + range.first, bytes(c.in) + range.first, range.count, nbytes);
      },
      [&](std::uint64_t round) {
        if (place_ != root)
          copy_to_user(bytes(c.out) + rounds[round].first, inputs_.at[root], rounds[round].count, nbytes);
      });
}

void ShmTransport::all_gather(Call& call, const Collective& c) {
  const std::size_t nbytes = c.nbytes();
  unsigned char* own = bytes(c.out) + place_ * nbytes;
  if (inputs_.are_complete) {
    copy_block(call, own, c.in, nbytes, nbytes * size_);
    // Each rank begins with a different peer, so that none is read by all at once.
    for (int step = 1; step < size_; ++step) {
      const int peer = (place_ + step) % size_;
      copy_from(call, peer, inputs_.is_foreign[peer], bytes(c.out) + peer * nbytes, inputs_.at[peer], nbytes,
                nbytes * size_);
    }
    return;
  }
  const Slots slots = slots_for(nbytes, 1);
  const Rounds rounds(nbytes, slots.piece_nbytes);
  run_rounds(
      call, rounds.number(), slots, {},
      [&](std::uint64_t round, void* slot) {
        const Range range = rounds[round];
        staging_.copy(slot, bytes(c.in) + range.first, range.count);
        copy_part(own + range.first, bytes(c.in) + range.first, range.count, nbytes * size_);
      },
      [&](std::uint64_t round) {
        for (int peer = 0; peer < size_; ++peer)
          if (peer != place_)
            copy_to_user(bytes(c.out) + peer * nbytes + rounds[round].first, inputs_.at[peer],
                         rounds[round].count, nbytes * size_);
      });
}

void ShmTransport::gather(Call& call, const Collective& c) {
  const std::size_t nbytes = c.nbytes();
  const int root = place_of_[c.root];
  if (place_ == root) copy_block(call, bytes(c.out) + place_ * nbytes, c.in, nbytes, nbytes * size_);
  if (inputs_.are_complete) {
    for (int peer = 0; peer < size_ && place_ == root; ++peer)
      if (peer != root)
        copy_block(call, bytes(c.out) + peer * nbytes, inputs_.at[peer], nbytes, nbytes * size_);
    return;
  }
  const Slots slots = slots_for(nbytes, 1);
  const Rounds rounds(nbytes, slots.piece_nbytes);
  run_rounds(
      call, rounds.number(), slots, Roles{Roles::kEverybody, root},
      [&](std::uint64_t round, void* slot) {
        if (place_ != root) staging_.copy(slot, bytes(c.in) + rounds[round].first, rounds[round].count);
      },
      [&](std::uint64_t round) {
        for (int peer = 0; peer < size_; ++peer)
          if (peer != root)
            copy_to_user(bytes(c.out) + peer * nbytes + rounds[round].first, inputs_.at[peer],
                         rounds[round].count, nbytes * size_);
      });
}

void ShmTransport::scatter(Call& call, const Collective& c) {
  const std::size_t nbytes = c.nbytes();
  const int root = place_of_[c.root];
  if (inputs_.are_complete)
    return copy_from(call, root, inputs_.is_foreign[root], c.out, inputs_.at[root] + place_ * nbytes, nbytes,
                     nbytes);
  if (place_ == root) copy_block(call, c.out, bytes(c.in) + root * nbytes, nbytes, nbytes);
  const Slots slots = slots_for(nbytes, size_ - 1);
  const Rounds rounds(nbytes, slots.piece_nbytes);
  run_rounds(
      call, rounds.number(), slots, Roles{root, Roles::kEverybody},
      [&](std::uint64_t round, unsigned char* slot) {
        for (int peer = 0; peer < size_; ++peer)
          if (peer != root)
            staging_.copy(slot + piece_offset(slots, root, peer),
                          bytes(c.in) + peer * nbytes + rounds[round].first, rounds[round].count);
      },
      [&](std::uint64_t round) {
        if (place_ != root)
          copy_to_user(bytes(c.out) + rounds[round].first,
                       inputs_.at[root] + piece_offset(slots, root, place_), rounds[round].count, nbytes);
      });
}

void ShmTransport::all_to_all(Call& call, const Collective& c) {
  const std::size_t nbytes = c.nbytes();
  if (inputs_.are_complete) {
    for (int step = 0; step < size_; ++step) {
      const int peer = (place_ + step) % size_;
      copy_from(call, peer, inputs_.is_foreign[peer], bytes(c.out) + peer * nbytes,
                inputs_.at[peer] + place_ * nbytes, nbytes, nbytes * size_);
    }
    return;
  }
  const std::vector<std::size_t> counts(size_, c.count);
  all_to_all_rounds(call, c, counts.data(), counts.data(), c.count);
}

void ShmTransport::all_to_all_uneven(Call& call, const Collective& c) {
  std::size_t most = 0;  // between any two ranks, so that all run equally many rounds
  for (int src = 0; src < size_; ++src) {
    const std::uint64_t* sent = counts_of(src);
    for (int dst = 0; dst < size_; ++dst)
      if (src != dst) most = std::max<std::size_t>(most, sent[dst]);
  }
  const std::size_t largest = std::max(most, c.send_counts[place_]) * item_size(c.dtype);
  if (largest > shm_cost::kBriefNbytes) call.begin_blocking();
  all_to_all_rounds(call, c, c.send_counts, c.recv_counts, most);
}

// In place, a round overwrites only what it and the rounds before it have staged.
void ShmTransport::all_to_all_rounds(Call& call, const Collective& c, const std::size_t* send_counts,
                                     const std::size_t* recv_counts, std::size_t most) {
  const std::size_t itemsize = item_size(c.dtype);
  std::vector<std::size_t> send_first(size_), recv_first(size_);
  for (int peer = 1; peer < size_; ++peer) {
    send_first[peer] = send_first[peer - 1] + send_counts[peer - 1];
    recv_first[peer] = recv_first[peer - 1] + recv_counts[peer - 1];
  }
  const Slots slots = slots_for(most * itemsize, size_ - 1);
  const Rounds rounds(most, slots.piece_nbytes / itemsize);
  const auto clip = [&](std::uint64_t round, std::size_t count) {
    const Range range = rounds[round];
    const std::size_t first = std::min(range.first, count);
    return Range{first, std::min(range.count, count - first)};
  };
  const std::size_t output_nbytes = (recv_first[size_ - 1] + recv_counts[size_ - 1]) * itemsize;
  copy_block(call, bytes(c.out) + recv_first[place_] * itemsize, bytes(c.in) + send_first[place_] * itemsize,
             send_counts[place_] * itemsize, output_nbytes);
  run_rounds(
      call, rounds.number(), slots, {},
      [&](std::uint64_t round, unsigned char* slot) {
        for (int peer = 0; peer < size_; ++peer) {
          const Range range = clip(round, send_counts[peer]);
          if (peer != place_)
            staging_.copy(slot + piece_offset(slots, place_, peer),
                          bytes(c.in) + (send_first[peer] + range.first) * itemsize, range.count * itemsize);
        }
      },
      [&](std::uint64_t round) {
        for (int peer = 0; peer < size_; ++peer) {
          const Range range = clip(round, recv_counts[peer]);
          if (peer != place_)
            copy_to_user(bytes(c.out) + (recv_first[peer] + range.first) * itemsize,
                         inputs_.at[peer] + piece_offset(slots, peer, place_), range.count * itemsize,
                         output_nbytes);
        }
      });
}

}  // namespace ferro
