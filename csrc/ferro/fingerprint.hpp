// What ranks must agree on in a collective, in a form that can be compared, sent,
// and put into words.
#ifndef FERRO_FINGERPRINT_HPP
#define FERRO_FINGERPRINT_HPP

#include <cstdint>
#include <string>

#include "ferro/error.hpp"
#include "ferro/types.hpp"

namespace ferro {

// One collective without its pointers. Fields that an operation does not use
// are zero, whatever the caller left in them: two barriers always agree.
// The layout is part of the wire format.
struct Fingerprint {
  // The count of an all_to_all whose counts differ from rank to rank.
  static constexpr std::uint64_t kUneven = ~std::uint64_t{0};

  Op op = Op::barrier;
  ReduceOp reduce_op = ReduceOp::sum;
  DType dtype = DType::boolean;
  std::uint8_t reserved = 0;
  std::int32_t root = 0;
  std::uint64_t count = 0;
  std::uint32_t tag = 0;
  std::uint32_t sequence = 0;
};
static_assert(sizeof(Fingerprint) == 24, "the wire format has no padding");

constexpr bool has_reduce_op(Op op) {
  return op == Op::allreduce || op == Op::reduce || op == Op::reduce_scatter;
}
constexpr bool has_root(Op op) {
  return op == Op::broadcast || op == Op::reduce || op == Op::gather || op == Op::scatter;
}

inline bool is_uneven(const Collective& collective) {
  return collective.op == Op::all_to_all &&
         (collective.send_counts != nullptr || collective.recv_counts != nullptr);
}

inline Fingerprint fingerprint_of(const Collective& collective, std::uint32_t sequence) {
  Fingerprint fingerprint;
  fingerprint.op = collective.op;
  fingerprint.tag = collective.tag;
  fingerprint.sequence = sequence;
  if (collective.op == Op::barrier) return fingerprint;
  fingerprint.dtype = collective.dtype;
  fingerprint.count = is_uneven(collective) ? Fingerprint::kUneven : collective.count;
  if (has_reduce_op(collective.op)) fingerprint.reduce_op = collective.reduce_op;
  if (has_root(collective.op)) fingerprint.root = collective.root;
  return fingerprint;
}

inline bool operator==(const Fingerprint& a, const Fingerprint& b) {
  return a.op == b.op && a.reduce_op == b.reduce_op && a.dtype == b.dtype && a.root == b.root &&
         a.count == b.count && a.tag == b.tag && a.sequence == b.sequence;
}
inline bool operator!=(const Fingerprint& a, const Fingerprint& b) { return !(a == b); }

// 32 bits that differ where fingerprints do, but for one pair in four billion.
// Equal fields give equal hashes on every machine. Costs two dependent multiplications.
inline std::uint32_t hash(const Fingerprint& fingerprint) {
  const std::uint64_t call = static_cast<std::uint64_t>(fingerprint.op) |
                             static_cast<std::uint64_t>(fingerprint.reduce_op) << 8 |
                             static_cast<std::uint64_t>(fingerprint.dtype) << 16 |
                             static_cast<std::uint64_t>(static_cast<std::uint32_t>(fingerprint.root)) << 32;
  const std::uint64_t order = fingerprint.tag | static_cast<std::uint64_t>(fingerprint.sequence) << 32;
  std::uint64_t h = (call ^ 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  h ^= fingerprint.count * 0x94d049bb133111ebu;
  h ^= order * 0xd6e8feb86659fd93u;
  h ^= h >> 32;
  return static_cast<std::uint32_t>((h * 0xff51afd7ed558ccdu) >> 32);
}

const char* name_of(ReduceOp reduce_op);
const char* name_of(DType dtype);

// The error that rank `own_rank` raises where these two ranks disagree: the same
// text on every rank; `peer` is the second rank or, on the second rank itself, the first.
Error mismatch_error(int own_rank, int first_rank, const Fingerprint& first, int second_rank,
                     const Fingerprint& second);
// The same where `sender` sends `receiver` a number of elements other than the one it expects.
Error unpaired_error(int own_rank, int sender, std::uint64_t sent, int receiver, std::uint64_t expected);

}  // namespace ferro

#endif  // FERRO_FINGERPRINT_HPP
