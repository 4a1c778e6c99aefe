// Which part of an array goes to whom.
#ifndef FERRO_PIECES_HPP
#define FERRO_PIECES_HPP

#include <cstddef>

#include "ferro/types.hpp"

namespace ferro {

// Not const, since pieces are both sent and received; the engine never writes through what came from `in`.
inline char* mutable_bytes(const void* data) { return static_cast<char*>(const_cast<void*>(data)); }

// The i-th of `parts` nearly equal parts; the first ones are the larger.
Range chunk_range(std::size_t count, int parts, int i);

// Where a collective takes what goes to a member, or puts what comes from it.
struct Piece {
  char* data;
  std::size_t nbytes;
};
// For the direct algorithm, in which each rank sends every other what that one needs.
// Empty where the operation moves nothing between these two.
Piece outgoing_piece(const Collective& collective, int index, int root_index, int peer_index);
Piece incoming_piece(const Collective& collective, int index, int root_index, int peer_index);

std::size_t all_to_all_input_nbytes(const Collective& collective, int num_members);
std::size_t all_to_all_output_nbytes(const Collective& collective, int num_members);

}  // namespace ferro

#endif  // FERRO_PIECES_HPP
