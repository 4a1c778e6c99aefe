#include "ferro/pieces.hpp"

#include <algorithm>

namespace ferro {
namespace {

std::size_t sum_of_first(const std::size_t* counts, int n) {
  std::size_t sum = 0;
  for (int i = 0; i < n; ++i) sum += counts[i];
  return sum;
}

// A piece of an array packed in rank order, of uneven pieces where counts are given.
Piece packed_piece(const void* base, const std::size_t* counts, std::size_t count, int i,
                   std::size_t itemsize) {
  const std::size_t begin = counts != nullptr ? sum_of_first(counts, i) : count * i;
  return {mutable_bytes(base) + begin * itemsize, (counts != nullptr ? counts[i] : count) * itemsize};
}

std::size_t packed_nbytes(const std::size_t* counts, std::size_t count, int n, std::size_t itemsize) {
  return (counts != nullptr ? sum_of_first(counts, n) : count * n) * itemsize;
}

Piece whole(const void* base, std::size_t nbytes) { return {mutable_bytes(base), nbytes}; }

}  // namespace

Range chunk_range(std::size_t count, int parts, int i) {
  const std::size_t n = static_cast<std::size_t>(parts), k = static_cast<std::size_t>(i);
  const std::size_t base = count / n, larger = count % n;
  return {k * base + std::min(k, larger), base + (k < larger ? 1 : 0)};
}

Piece outgoing_piece(const Collective& collective, int index, int root_index, int peer_index) {
  const std::size_t itemsize = item_size(collective.dtype), nbytes = collective.nbytes();
  const bool is_from_root = index == root_index, is_to_root = peer_index == root_index;
  switch (collective.op) {
    case Op::allreduce:
    case Op::all_gather:
    case Op::split:
      return whole(collective.in, nbytes);
    case Op::broadcast:
      return is_from_root ? whole(collective.in, nbytes) : Piece{};
    case Op::reduce:
    case Op::gather:
      return is_to_root ? whole(collective.in, nbytes) : Piece{};
    case Op::scatter:
      if (!is_from_root) return {};
      return packed_piece(collective.in, nullptr, collective.count, peer_index, itemsize);
    case Op::reduce_scatter:
      return packed_piece(collective.in, nullptr, collective.count, peer_index, itemsize);
    case Op::all_to_all:
      return packed_piece(collective.in, collective.send_counts, collective.count, peer_index, itemsize);
    default:
      return {};
  }
}

Piece incoming_piece(const Collective& collective, int index, int root_index, int peer_index) {
  const std::size_t itemsize = item_size(collective.dtype), nbytes = collective.nbytes();
  const bool is_root = index == root_index, is_from_root = peer_index == root_index;
  switch (collective.op) {
    case Op::broadcast:
    case Op::scatter:
      return is_from_root ? whole(collective.out, nbytes) : Piece{};
    case Op::gather:
      if (!is_root) return {};
      return packed_piece(collective.out, nullptr, collective.count, peer_index, itemsize);
    case Op::all_gather:
    case Op::split:
      return packed_piece(collective.out, nullptr, collective.count, peer_index, itemsize);
    case Op::all_to_all:
      return packed_piece(collective.out, collective.recv_counts, collective.count, peer_index, itemsize);
    // Inputs of a reduction have no place of their own.
    case Op::allreduce:
    case Op::reduce_scatter:
      return {nullptr, nbytes};
    case Op::reduce:
      return {nullptr, is_root ? nbytes : 0};
    default:
      return {};
  }
}

std::size_t all_to_all_input_nbytes(const Collective& collective, int num_members) {
  return packed_nbytes(collective.send_counts, collective.count, num_members, item_size(collective.dtype));
}

std::size_t all_to_all_output_nbytes(const Collective& collective, int num_members) {
  return packed_nbytes(collective.recv_counts, collective.count, num_members, item_size(collective.dtype));
}

}  // namespace ferro
