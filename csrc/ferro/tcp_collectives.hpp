// The steps of each collective among some ranks of a mesh, once it is known that
// all of them want the same. ALGORITHMS.md, section TCP.
#ifndef FERRO_TCP_COLLECTIVES_HPP
#define FERRO_TCP_COLLECTIVES_HPP

#include <cstddef>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/exchange.hpp"
#include "ferro/kernels.hpp"
#include "ferro/pieces.hpp"
#include "ferro/scratch.hpp"
#include "ferro/types.hpp"

namespace ferro {

class TcpCollectives {
 public:
  // `members` are ranks of the mesh, own rank among them, in the order of their chunks.
  TcpCollectives(TcpMesh& mesh, std::vector<int> members);

  int size() const { return static_cast<int>(members_.size()); }
  int index() const { return index_; }
  int member(int index) const { return members_[index]; }
  const std::vector<int>& members() const { return members_; }
  // All other indices, in the order in which this rank addresses them: each rank begins with
  // its successor, so that not all write to the same one first.
  const std::vector<int>& peers() const { return peers_; }
  // Throws Error{io} if the rank is not a member.
  int index_of(int rank) const;

  // Any of the operations of types.hpp but barrier. Roots are ranks, as everywhere.
  void run(Call& call, const Collective& collective);
  // An allreduce whose input is queued already, to every peer.
  void reduce_all(Exchange& exchange, const Collective& collective);

  // Throws Error{unsupported} where the reduction is not defined.
  static ReduceKernel kernel_for(DType dtype, ReduceOp op);
  // The last step of a MEAN, once the sum is known.
  static void divide(Call& call, void* data, DType dtype, std::size_t count, int divisor);

 private:
  class ReduceRing;

  void allreduce(Call& call, const Collective& collective);
  void allreduce_one_shot(Call& call, const Collective& collective);
  void allreduce_doubling(Call& call, const Collective& collective);
  // An allreduce or, if only the root collects results, a reduce.
  static constexpr int kEverybody = -1;
  void reduce_two_shot(Call& call, const Collective& collective, int sole_collector);
  void broadcast(Call& call, const Collective& collective);
  void broadcast_binomial(Call& call, const Collective& collective);
  void broadcast_chain(Call& call, const Collective& collective);
  void broadcast_scatter(Call& call, const Collective& collective);
  void reduce(Call& call, const Collective& collective);
  void reduce_direct(Call& call, const Collective& collective);
  void reduce_scatter(Call& call, const Collective& collective);
  void all_gather(Call& call, const Collective& collective);
  void all_gather_bruck(Call& call, const Collective& collective);
  void exchange_pieces(Call& call, const Collective& collective);
  void set_input_aside(Call& call, Collective& all_to_all);

  Piece chunk_of(const Collective& collective, const void* base, int i) const;

  TcpMesh& mesh_;
  std::vector<int> members_;
  int index_;
  std::vector<int> peers_;
  Scratch scratch_;  // what is received
  Scratch reduced_;  // results that have no place in an output
};

}  // namespace ferro

#endif  // FERRO_TCP_COLLECTIVES_HPP
