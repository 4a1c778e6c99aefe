// Collectives through shared memory.
//
// First the ranks compare what they were asked for. Then, piece by piece: every rank
// copies its input into its staging buffer, all meet, every rank takes what it needs
// from all the staging buffers, all meet again. Inputs are read and outputs written by
// their own rank alone, in its stream's thread: memory that was freed meanwhile faults
// where it was freed.
#include <algorithm>
#include <cstring>

#include "emulation/nccl/cudart_functions.hpp"
#include "emulation/nccl/element.hpp"
#include "emulation/nccl/operation.hpp"

namespace emulation {
namespace {

std::string describe(const CallRecord& call) {
  const auto kind = static_cast<Kind>(call.op);
  std::ostringstream text;
  text << function_of(kind) << " of " << call.count << " elements of "
       << name_of(static_cast<ncclDataType_t>(call.dtype));
  if (call.reduction >= 0) text << ", operation " << call.reduction;
  if (call.root >= 0) text << ", root " << call.root;
  if (call.is_registered != 0) text << ", of registered memory";
  return text.str();
}

// Ranks whose memory is registered may wait for the same of all others, which never comes.
bool is_same(const CallRecord& a, const CallRecord& b) {
  return a.op == b.op && a.dtype == b.dtype && a.count == b.count && a.root == b.root &&
         a.reduction == b.reduction && a.is_registered == b.is_registered;
}

// One collective, on one rank.
class Collective {
 public:
  Collective(Communicator& communicator, const Operation& operation)
      : communicator_(communicator),
        segment_(communicator.segment()),
        operation_(operation),
        rank_(static_cast<std::size_t>(communicator.rank)),
        num_ranks_(static_cast<std::size_t>(communicator.num_ranks)),
        element_nbytes_(element_nbytes(operation.dtype)) {
    prepare_multiplier();
  }

  void agree();
  void run();

 private:
  void barrier() { segment_.barrier(Barrier::stream, communicator_.operations_stop()); }
  bool is_root() const { return communicator_.rank == operation_.peer; }
  const char* in(std::size_t element) const {
    return static_cast<const char*>(operation_.in) + element * element_nbytes_;
  }
  char* out(std::size_t element) const {
    return static_cast<char*>(operation_.out) + element * element_nbytes_;
  }
  char* staged(std::size_t rank, std::size_t element) {
    return segment_.staging(static_cast<int>(rank)) + element * element_nbytes_;
  }

  // Steps through `count` elements, as many at a time as fit into the staging buffer `parts` times.
  template <class Stage, class Take>
  void in_pieces(std::size_t parts, Stage stage, Take take) {
    const std::size_t piece = kStagingNbytes / element_nbytes_ / parts;
    for (std::size_t at = 0; at < operation_.count; at += piece) {
      const std::size_t n = std::min(piece, operation_.count - at);
      stage(at, n);
      barrier();
      take(at, n);
      barrier();
    }
  }

  void prepare_multiplier();
  void stage(std::size_t slot, std::size_t element, std::size_t n);
  void stage_for_all(std::size_t at, std::size_t n);
  void copy_out(std::size_t element, const char* from, std::size_t n) {
    std::memcpy(out(element), from, n * element_nbytes_);
  }
  void reduce_staged(std::size_t slot, std::size_t element, std::size_t n);

  void reduce_everywhere(bool at_root_only);
  void broadcast();
  void gather(bool at_root_only);
  void reduce_scatter();
  void all_to_all();
  void scatter();

  Communicator& communicator_;
  Segment& segment_;
  const Operation& operation_;
  const std::size_t rank_;
  const std::size_t num_ranks_;
  const std::size_t element_nbytes_;
  bool has_multiplier_ = false;
  unsigned char multiplier_[16] = {};
};

void Collective::prepare_multiplier() {
  if (operation_.has_multiplier) {
    const Multiplier& given = operation_.multiplier;
    has_multiplier_ = true;
    std::memcpy(multiplier_, given.device_scalar != nullptr ? given.device_scalar : given.scalar,
                element_nbytes_);
  } else if (is_reduction(operation_.kind) && operation_.reduction == ncclAvg &&
             !is_integer(operation_.dtype)) {
    // NCCL's average: inputs times 1 / n in their own dtype, with its roundings. Integers
    // are summed first.
    has_multiplier_ = true;
    reciprocal(operation_.dtype, communicator_.num_ranks, multiplier_);
  }
}

void Collective::agree() {
  CallRecord call{};
  call.sequence = communicator_.next_sequence();
  call.count = operation_.count;
  call.op = static_cast<std::int32_t>(operation_.kind);
  call.dtype = operation_.dtype;
  call.reduction = !is_reduction(operation_.kind) ? -1
                   : operation_.has_multiplier    ? ncclNumOps
                                                  : operation_.reduction;
  call.root = has_peer(operation_.kind) ? operation_.peer : -1;
  call.is_registered = operation_.is_registered;
  const std::size_t parity = call.sequence % 2;
  segment_.part(communicator_.rank).calls[parity] = call;
  barrier();
  for (int peer = 0; peer < communicator_.num_ranks; ++peer) {
    const CallRecord theirs = segment_.part(peer).calls[parity];
    if (is_same(theirs, call)) continue;
    std::ostringstream text;
    text << "collective " << call.sequence << " of this communicator differs between its ranks: rank "
         << communicator_.rank << " called " << describe(call) << "; rank " << peer << " called "
         << describe(theirs);
    complain(text.str());
    fail(ncclInvalidArgument, text.str());
  }
}

void Collective::stage(std::size_t slot, std::size_t element, std::size_t n) {
  char* at = staged(rank_, slot);
  std::memcpy(at, in(element), n * element_nbytes_);
  if (has_multiplier_) scale(operation_.dtype, at, multiplier_, n);
}

void Collective::stage_for_all(std::size_t at, std::size_t n) {
  for (std::size_t peer = 0; peer < num_ranks_; ++peer) stage(peer * n, peer * operation_.count + at, n);
}

void Collective::reduce_staged(std::size_t slot, std::size_t element, std::size_t n) {
  if (num_ranks_ == 1) return copy_out(element, staged(0, slot), n);  // NCCL computes nothing then, either
  const void* inputs[kMaxRanks];
  for (std::size_t peer = 0; peer < num_ranks_; ++peer) inputs[peer] = staged(peer, slot);
  const ncclRedOp_t op = operation_.reduction == ncclAvg ? ncclSum : operation_.reduction;
  reduce(operation_.dtype, op, out(element), inputs, communicator_.num_ranks, n);
  if (operation_.reduction == ncclAvg && is_integer(operation_.dtype)) {
    divide(operation_.dtype, out(element), communicator_.num_ranks, n);
  }
}

void Collective::reduce_everywhere(bool at_root_only) {
  in_pieces(
      1, [&](std::size_t at, std::size_t n) { stage(0, at, n); },
      [&](std::size_t at, std::size_t n) {
        if (!at_root_only || is_root()) reduce_staged(0, at, n);
      });
}

void Collective::broadcast() {
  in_pieces(
      1,
      [&](std::size_t at, std::size_t n) {
        if (is_root()) stage(0, at, n);
      },
      [&](std::size_t at, std::size_t n) {
        copy_out(at, staged(static_cast<std::size_t>(operation_.peer), 0), n);
      });
}

void Collective::gather(bool at_root_only) {
  in_pieces(
      1, [&](std::size_t at, std::size_t n) { stage(0, at, n); },
      [&](std::size_t at, std::size_t n) {
        if (at_root_only && !is_root()) return;
        for (std::size_t peer = 0; peer < num_ranks_; ++peer) {
          copy_out(peer * operation_.count + at, staged(peer, 0), n);
        }
      });
}

void Collective::reduce_scatter() {
  in_pieces(
      num_ranks_, [&](std::size_t at, std::size_t n) { stage_for_all(at, n); },
      [&](std::size_t at, std::size_t n) { reduce_staged(rank_ * n, at, n); });
}

void Collective::all_to_all() {
  in_pieces(
      num_ranks_, [&](std::size_t at, std::size_t n) { stage_for_all(at, n); },
      [&](std::size_t at, std::size_t n) {
        for (std::size_t peer = 0; peer < num_ranks_; ++peer) {
          copy_out(peer * operation_.count + at, staged(peer, rank_ * n), n);
        }
      });
}

void Collective::scatter() {
  in_pieces(
      num_ranks_,
      [&](std::size_t at, std::size_t n) {
        if (is_root()) stage_for_all(at, n);
      },
      [&](std::size_t at, std::size_t n) {
        copy_out(at, staged(static_cast<std::size_t>(operation_.peer), rank_ * n), n);
      });
}

void Collective::run() {
  switch (operation_.kind) {
    case Kind::allreduce:
      return reduce_everywhere(false);
    case Kind::reduce:
      return reduce_everywhere(true);
    case Kind::broadcast:
      return broadcast();
    case Kind::all_gather:
      return gather(false);
    case Kind::gather:
      return gather(true);
    case Kind::reduce_scatter:
      return reduce_scatter();
    case Kind::all_to_all:
      return all_to_all();
    case Kind::scatter:
      return scatter();
    default:
      fail(ncclInternalError, "no collective");
  }
}

}  // namespace

void run_collective(Communicator& communicator, const Operation& operation) {
  Collective collective(communicator, operation);
  collective.agree();
  collective.run();
}

}  // namespace emulation
