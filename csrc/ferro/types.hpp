// The vocabulary of the engine: element types, reduce operations, and the
// description of one collective.
#ifndef FERRO_TYPES_HPP
#define FERRO_TYPES_HPP

#include <cstddef>
#include <cstdint>

namespace ferro {

// Values are part of the wire format and of _native/libferro.pxd: append only.
enum class DType : std::uint8_t {
  boolean,
  int8,
  uint8,
  int16,
  uint16,
  int32,
  uint32,
  int64,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  float8_e4m3,
  float8_e5m2,  // floats of 8 bits are moved, never reduced on a host
};
constexpr int kDTypeCount = 17;

constexpr std::size_t item_size(DType dtype) {
  constexpr std::uint8_t sizes[kDTypeCount] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

enum class ReduceOp : std::uint8_t { sum, mean, prod, min, max };
constexpr int kReduceOpCount = 5;

enum class Op : std::uint8_t {
  allreduce,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  barrier,
  split,  // an all_gather under another name, which no all_gather of the program can be taken for
  send,
  recv,
  sendrecv,
  batch,
};

constexpr bool is_message(Op op) {
  return op == Op::send || op == Op::recv || op == Op::sendrecv || op == Op::batch;
}

// The public name of a call.
inline const char* name_of(Op op) {
  static constexpr const char* names[] = {
      "allreduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather",
      "scatter",   "barrier",   "split",  "send",       "recv",           "sendrecv",   "batch",
  };
  const auto index = static_cast<std::size_t>(op);
  return index < sizeof names / sizeof *names ? names[index] : "unknown";
}

// One collective as one rank calls it. Every field but the pointers (and, for
// an uneven all_to_all, the counts) must be the same on every rank.
struct Collective {
  Op op = Op::barrier;
  ReduceOp reduce_op = ReduceOp::sum;
  DType dtype = DType::uint8;
  int root = 0;
  // Elements of `in` for allreduce, broadcast and reduce; elements per rank
  // for all_gather, reduce_scatter, gather, scatter and an even all_to_all.
  std::size_t count = 0;
  const void* in = nullptr;  // unread where this rank has nothing to give
  void* out = nullptr;       // unwritten where this rank receives nothing; in == out means in place
  // Uneven all_to_all: elements to and from each rank, packed without gaps in
  // rank order. Null means `count` to and from everybody.
  const std::size_t* send_counts = nullptr;
  const std::size_t* recv_counts = nullptr;
  std::uint32_t tag = 0;  // the caller's own mark; ranks that disagree on it mismatch

  // For the steps of which another one consists.
  static Collective of(Op op, DType dtype, std::size_t count, const void* in, void* out) {
    Collective collective;
    collective.op = op;
    collective.dtype = dtype;
    collective.count = count;
    return collective.between(in, out);
  }
  Collective between(const void* new_in, void* new_out) const {
    Collective collective = *this;
    collective.in = new_in;
    collective.out = new_out;
    return collective;
  }
  Collective rooted(int rank) const {
    Collective collective = *this;
    collective.root = rank;
    return collective;
  }
  Collective reducing(ReduceOp by) const {
    Collective collective = *this;
    collective.reduce_op = by;
    return collective;
  }

  std::size_t nbytes() const { return count * item_size(dtype); }
};

// Elements [first, first + count) of an array.
struct Range {
  std::size_t first;
  std::size_t count;
};

// One message between two ranks, as one of them calls it.
struct PointToPoint {
  bool is_send = false;
  int peer = 0;
  void* data = nullptr;  // only read if is_send
  std::size_t count = 0;
  DType dtype = DType::uint8;
  std::uint32_t tag = 0;

  std::size_t nbytes() const { return count * item_size(dtype); }
};

}  // namespace ferro

#endif  // FERRO_TYPES_HPP
