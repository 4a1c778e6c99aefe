#include "ferro/tcp_collectives.hpp"

#include <algorithm>
#include <functional>

#include "ferro/fingerprint.hpp"
#include "ferro/passes.hpp"
#include "ferro/recursive_doubling.hpp"
#include "ferro/reduction.hpp"
#include "ferro/tcp_cost.hpp"
#include "ferro/wide_float.hpp"

namespace ferro {
namespace {

bool overlap(const void* a, std::size_t a_nbytes, const void* b, std::size_t b_nbytes) {
  const std::less<const char*> before;
  return before(mutable_bytes(a), mutable_bytes(b) + b_nbytes) &&
         before(mutable_bytes(b), mutable_bytes(a) + a_nbytes);
}

}  // namespace

// Receives one array from every peer and reduces it with this rank's own, segment
// by segment, as soon as a segment of all of them is there: a window of slots
// per peer, so that one is received while another is reduced and the whole stays
// in the cache. The sources are reduced in the members' order by one call of the
// kernel, so timing cannot change a bit of the result.
class TcpCollectives::ReduceRing {
 public:
  ReduceRing(TcpCollectives& group, Exchange& exchange, const void* own, void* out, std::size_t count,
             DType dtype, ReduceOp op)
      : group_(group),
        exchange_(exchange),
        own_(mutable_bytes(own)),
        out_(mutable_bytes(out)),
        nbytes_(count * item_size(dtype)),
        itemsize_(item_size(dtype)),
        kernel_(kernel_for(dtype, op)),
        divisor_(divisor_of(op, group.size())),
        // A multiple of every item size, so that no element is split.
        segment_nbytes_(reduce_segment_nbytes(group.size(), nbytes_) / 64 * 64),
        slot_nbytes_(std::min(segment_nbytes_, nbytes_)),
        slots_(group.scratch_.reserve(slot_nbytes_ * kReduceSlots * group.size())),
        sources_(group.size()) {}

  bool is_done() const { return reduced_ == nbytes_; }
  bool is_posted() const { return posted_ == nbytes_; }
  std::size_t reduced_nbytes() const { return reduced_; }

  // Queues receives into all free slots.
  void post() {
    while (posted_ < nbytes_ &&
           posted_ - reduced_ / segment_nbytes_ * segment_nbytes_ < kReduceSlots * segment_nbytes_) {
      const std::size_t nbytes = std::min(segment_nbytes_, nbytes_ - posted_);
      for (const int peer : group_.peers())
        exchange_.receive(group_.member(peer), slot(peer, posted_), nbytes);
      posted_ += nbytes;
    }
  }

  // Reduces the segments that are complete, up to `limit` bytes. True if there were any.
  bool reduce_arrived(std::size_t limit) {
    const std::size_t before = reduced_;
    const std::size_t ready = std::min(limit, arrived());
    while (reduced_ < nbytes_) {
      const std::size_t nbytes = std::min(segment_nbytes_, nbytes_ - reduced_);
      if (reduced_ + nbytes > ready) break;
      for (int i = 0; i < group_.size(); ++i)
        sources_[i] = i == group_.index() ? own_ + reduced_ : slot(i, reduced_);
      kernel_(out_ + reduced_, sources_.data(), group_.size(), nbytes / itemsize_, divisor_);
      reduced_ += nbytes;
    }
    return reduced_ > before;
  }
  bool reduce_arrived() { return reduce_arrived(nbytes_); }

  // Returns once everything is reduced.
  void finish() {
    while (!is_done()) {
      post();
      if (!reduce_arrived()) exchange_.wait();
    }
  }

 private:
  std::size_t arrived() const {
    std::size_t least = nbytes_;
    for (const int peer : group_.peers())
      least = std::min(least, exchange_.num_received(group_.member(peer)));
    return least;
  }
  char* slot(int peer, std::size_t offset) const {
    const std::size_t turn = offset / segment_nbytes_ % kReduceSlots;
    return slots_ + (peer * kReduceSlots + turn) * slot_nbytes_;
  }

  TcpCollectives& group_;
  Exchange& exchange_;
  char* own_;
  char* out_;
  std::size_t nbytes_, itemsize_;
  ReduceKernel kernel_;
  int divisor_;
  std::size_t segment_nbytes_, slot_nbytes_;
  char* slots_;
  std::vector<const void*> sources_;
  std::size_t posted_ = 0, reduced_ = 0;
};

void TcpCollectives::run(Call& call, const Collective& collective) {
  switch (collective.op) {
    case Op::allreduce:
      return allreduce(call, collective);
    case Op::broadcast:
      return broadcast(call, collective);
    case Op::reduce:
      return reduce(call, collective);
    case Op::reduce_scatter:
      return reduce_scatter(call, collective);
    case Op::all_gather:
    case Op::split:
      return all_gather(call, collective);
    case Op::all_to_all:
    case Op::gather:
    case Op::scatter:
      return exchange_pieces(call, collective);
    default:
      throw Error(ErrorCode::unsupported, -1, std::string(name_of(collective.op)) + " moves nothing");
  }
}

// One rank's share of a whole array that all have.
Piece TcpCollectives::chunk_of(const Collective& collective, const void* base, int i) const {
  const std::size_t itemsize = item_size(collective.dtype);
  const Range range = chunk_range(collective.count, size(), i);
  return {mutable_bytes(base) + range.first * itemsize, range.count * itemsize};
}

void TcpCollectives::allreduce(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  const std::size_t partial_nbytes = collective.count * item_size(partial_dtype(collective));
  if (size() == 1) return copy_in_passes(call, collective.out, collective.in, nbytes);
  switch (choose_allreduce(size(), static_cast<double>(nbytes), static_cast<double>(partial_nbytes))) {
    case AllreduceAlgorithm::one_shot:
      return allreduce_one_shot(call, collective);
    case AllreduceAlgorithm::recursive_doubling:
      return allreduce_doubling(call, collective);
    case AllreduceAlgorithm::reduce_scatter_all_gather:
      return reduce_two_shot(call, collective, kEverybody);
  }
}

// Each rank sends its whole array to all and reduces all.
void TcpCollectives::allreduce_one_shot(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  Exchange exchange(mesh_, call);
  for (const int peer : peers()) exchange.send(member(peer), collective.in, nbytes);
  reduce_all(exchange, collective);
}

void TcpCollectives::reduce_all(Exchange& exchange, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  ReduceRing ring(*this, exchange, collective.in, collective.out, collective.count, collective.dtype,
                  collective.reduce_op);
  // In place, a result must not overwrite what some peer has yet to be sent. All
  // ranks send to the one that is furthest behind, so they cannot block each other.
  const bool is_in_place = collective.in == collective.out;
  while (!ring.is_done()) {
    ring.post();
    std::size_t limit = nbytes;
    if (is_in_place)
      for (const int peer : peers()) limit = std::min(limit, exchange.num_sent(member(peer)));
    if (!ring.reduce_arrived(limit)) exchange.wait();
  }
  exchange.finish();
}

// Pairs of ranks exchange what they have reduced so far: recursive_doubling.hpp. The lower
// block is always the first operand, so both of a pair compute the same bits.
void TcpCollectives::allreduce_doubling(Call& call, const Collective& collective) {
  const DType partial = partial_dtype(collective);
  const ReduceKernel kernel = kernel_for(partial, partial_op(collective.reduce_op));
  const std::size_t nbytes = collective.count * item_size(partial);
  char* const own = scratch_.reserve(2 * nbytes);
  char* const theirs = own + nbytes;
  to_partial(call, own, partial, collective.in, collective.dtype, collective.count);
  for (const DoublingStep& step : doubling_steps(size(), index())) {
    Exchange exchange(mesh_, call);
    if (step.sends) exchange.send(member(step.peer), own, nbytes);
    if (step.receives) exchange.receive(member(step.peer), step.is_result ? own : theirs, nbytes);
    exchange.finish();
    if (!step.receives || step.is_result) continue;
    const void* sources[2] = {own, theirs};
    if (step.peer < index()) std::swap(sources[0], sources[1]);
    kernel(own, sources, 2, collective.count, 1);
  }
  if (collective.reduce_op == ReduceOp::mean) divide(call, own, partial, collective.count, size());
  from_partial(call, collective.out, collective.dtype, own, partial, collective.count);
}

// Each rank reduces one chunk of all arrays and sends it to whoever collects: to all, or to one.
// The two halves overlap: a segment goes out as soon as it is reduced.
void TcpCollectives::reduce_two_shot(Call& call, const Collective& collective, int sole_collector) {
  const auto collects = [&](int i) { return sole_collector == kEverybody || sole_collector == i; };
  const Piece own = chunk_of(collective, collective.in, index());
  // Without an output, what is reduced needs a place of its own.
  char* const reduced =
      collects(index()) ? chunk_of(collective, collective.out, index()).data : reduced_.reserve(own.nbytes);
  Exchange exchange(mesh_, call);
  for (const int peer : peers()) exchange.send(member(peer), chunk_of(collective, collective.in, peer));
  ReduceRing ring(*this, exchange, own.data, reduced, own.nbytes / item_size(collective.dtype),
                  collective.dtype, collective.reduce_op);
  bool is_gathering = !collects(index());
  while (!ring.is_done() || !is_gathering || !exchange.is_done()) {
    ring.post();
    if (ring.is_posted() && !is_gathering) {
      is_gathering = true;
      // In place this overwrites a chunk of the input, but its owner sends a
      // segment only after it has received ours.
      for (const int peer : peers())
        exchange.receive(member(peer), chunk_of(collective, collective.out, peer));
    }
    const std::size_t before = ring.reduced_nbytes();
    if (ring.reduce_arrived()) {
      for (const int peer : peers())
        if (collects(peer)) exchange.send(member(peer), reduced + before, ring.reduced_nbytes() - before);
    } else if (!exchange.is_done()) {
      exchange.wait();
    }
  }
}

void TcpCollectives::broadcast(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  if (member(index()) == collective.root)
    copy_in_passes(call, collective.out, collective.in, collective.out ? nbytes : 0);
  if (size() == 1) return;
  switch (choose_broadcast(size(), static_cast<double>(nbytes))) {
    case BroadcastAlgorithm::binomial:
      return broadcast_binomial(call, collective);
    case BroadcastAlgorithm::chain:
      return broadcast_chain(call, collective);
    case BroadcastAlgorithm::scatter_all_gather:
      return broadcast_scatter(call, collective);
  }
}

// A rank that has the data sends it to the one half its subtree away, then a quarter, and so on.
void TcpCollectives::broadcast_binomial(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  const int root = index_of(collective.root);
  const int distance = (index() - root + size()) % size();
  const auto at_distance = [&](int d) { return member((root + d) % size()); };
  const void* const data = distance == 0 ? collective.in : collective.out;
  int reach = 1;  // this rank's subtree: itself and those less than this far behind it
  while (reach < size() && (distance & reach) == 0) reach *= 2;
  Exchange exchange(mesh_, call);
  if (distance != 0) {
    exchange.receive(at_distance(distance - reach), collective.out, nbytes);
    exchange.finish();
  }
  for (int step = reach / 2; step > 0; step /= 2)
    if (distance + step < size()) exchange.send(at_distance(distance + step), data, nbytes);
  exchange.finish();
}

// Each rank passes on what it gets to the next, in segments.
void TcpCollectives::broadcast_chain(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  const int root = index_of(collective.root);
  const int distance = (index() - root + size()) % size();
  const int next = distance + 1 < size() ? member((index() + 1) % size()) : -1;
  Exchange exchange(mesh_, call);
  if (distance == 0) {
    exchange.send(next, collective.in, nbytes);
    return exchange.finish();
  }
  const int previous = member((index() - 1 + size()) % size());
  exchange.receive(previous, collective.out, nbytes);
  std::size_t passed = 0;
  while (passed < nbytes || !exchange.is_done()) {
    const std::size_t arrived = exchange.num_received(previous);
    if (arrived == nbytes || arrived - passed >= kChainSegmentNbytes) {
      if (next >= 0) exchange.send(next, mutable_bytes(collective.out) + passed, arrived - passed);
      passed = arrived;
    }
    if (!exchange.is_done()) exchange.wait();
  }
}

// The root gives each rank one chunk; then all give theirs to all.
void TcpCollectives::broadcast_scatter(Call& call, const Collective& collective) {
  const int root = index_of(collective.root);
  const bool is_root = index() == root;
  Exchange exchange(mesh_, call);
  const Piece own = chunk_of(collective, is_root ? collective.in : collective.out, index());
  if (!is_root) {
    exchange.receive(collective.root, own);
    for (const int peer : peers()) exchange.receive(member(peer), chunk_of(collective, collective.out, peer));
    while (exchange.num_received(collective.root) < own.nbytes) exchange.wait();
  }
  if (is_root)
    for (const int peer : peers()) exchange.send(member(peer), chunk_of(collective, collective.in, peer));
  for (const int peer : peers())
    if (peer != root) exchange.send(member(peer), own);
  exchange.finish();
}

void TcpCollectives::reduce(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  if (size() == 1) return copy_in_passes(call, collective.out, collective.in, nbytes);
  if (is_reduce_direct(size(), static_cast<double>(nbytes))) return reduce_direct(call, collective);
  reduce_two_shot(call, collective, index_of(collective.root));
}

// The root takes and reduces everything.
void TcpCollectives::reduce_direct(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  Exchange exchange(mesh_, call);
  if (member(index()) != collective.root) {
    exchange.send(collective.root, collective.in, nbytes);
    return exchange.finish();
  }
  ReduceRing ring(*this, exchange, collective.in, collective.out, collective.count, collective.dtype,
                  collective.reduce_op);
  ring.finish();
}

// The first half of reduce_two_shot, with chunks of equal size.
void TcpCollectives::reduce_scatter(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  const auto chunk_for = [&](int i) { return mutable_bytes(collective.in) + i * nbytes; };
  if (size() == 1) return copy_in_passes(call, collective.out, collective.in, nbytes);
  // A result written over chunks that are still to be sent must wait elsewhere.
  const bool is_over_input =
      collective.out != chunk_for(index()) && overlap(collective.out, nbytes, collective.in, nbytes * size());
  void* const out = is_over_input ? reduced_.reserve(nbytes) : collective.out;
  Exchange exchange(mesh_, call);
  for (const int peer : peers()) exchange.send(member(peer), chunk_for(peer), nbytes);
  ReduceRing ring(*this, exchange, chunk_for(index()), out, collective.count, collective.dtype,
                  collective.reduce_op);
  ring.finish();
  exchange.finish();
  copy_in_passes(call, collective.out, out, nbytes);
}

void TcpCollectives::all_gather(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  // After this copy the input is not read: it may be a part of the output that is
  // about to be received.
  char* const own = mutable_bytes(collective.out) + index() * nbytes;
  copy_in_passes(call, own, collective.in, nbytes);
  if (size() > 2 && is_all_gather_doubling(size(), static_cast<double>(nbytes)))
    return all_gather_bruck(call, collective);
  Exchange exchange(mesh_, call);
  for (const int peer : peers()) exchange.send(member(peer), own, nbytes);
  for (const int peer : peers())
    exchange.receive(member(peer), mutable_bytes(collective.out) + peer * nbytes, nbytes);
  exchange.finish();
}

// In step k each rank sends what it has, its own chunk first, to the rank 2^k before
// it, and receives as much from the rank 2^k after it.
void TcpCollectives::all_gather_bruck(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  char* const blocks = scratch_.reserve(nbytes * size());
  copy_in_passes(call, blocks, mutable_bytes(collective.out) + index() * nbytes, nbytes);
  for (int have = 1; have < size(); have *= 2) {
    const int num_moved = std::min(have, size() - have);
    const std::size_t moved_nbytes = nbytes * num_moved;
    Exchange exchange(mesh_, call);
    exchange.send(member((index() - have + size()) % size()), blocks, moved_nbytes);
    exchange.receive(member((index() + have) % size()), blocks + have * nbytes, moved_nbytes);
    exchange.finish();
  }
  for (int i = 0; i < size(); ++i) {
    const int source = (index() + i) % size();
    copy_in_passes(call, mutable_bytes(collective.out) + source * nbytes, blocks + i * nbytes, nbytes);
  }
}

// gather, scatter, all_to_all: each pair of ranks has a piece of its own to move, so
// all pieces travel at once, straight to where they belong.
void TcpCollectives::exchange_pieces(Call& call, const Collective& original) {
  const int root = has_root(original.op) ? index_of(original.root) : -1;
  Collective collective = original;
  if (collective.op == Op::all_to_all) set_input_aside(call, collective);
  const Piece own_in = outgoing_piece(collective, index(), root, index());
  const Piece own_out = incoming_piece(collective, index(), root, index());
  const auto keep_own = [&] {
    copy_in_passes(call, own_out.data, own_in.data, std::min(own_in.nbytes, own_out.nbytes));
  };
  // In place, this rank's own piece of a gather may lie where another's belongs, and that
  // of a scatter belongs where another's lies until it is sent.
  if (collective.op != Op::scatter) keep_own();
  Exchange exchange(mesh_, call);
  for (const int peer : peers()) exchange.send(member(peer), outgoing_piece(collective, index(), root, peer));
  for (const int peer : peers())
    exchange.receive(member(peer), incoming_piece(collective, index(), root, peer));
  exchange.finish();
  if (collective.op == Op::scatter) keep_own();
}

// What an all_to_all receives may overwrite what has yet to be sent.
void TcpCollectives::set_input_aside(Call& call, Collective& all_to_all) {
  const std::size_t in_nbytes = all_to_all_input_nbytes(all_to_all, size()),
                    out_nbytes = all_to_all_output_nbytes(all_to_all, size());
  if (!overlap(all_to_all.in, in_nbytes, all_to_all.out, out_nbytes)) return;
  char* const input = scratch_.reserve(in_nbytes);
  copy_in_passes(call, input, all_to_all.in, in_nbytes);
  all_to_all.in = input;
}

}  // namespace ferro
