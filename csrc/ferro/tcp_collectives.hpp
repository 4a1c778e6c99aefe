// The steps of each collective among some ranks of a mesh, once it is known that
// all of them want the same. ALGORITHMS.md, section TCP.
#ifndef FERRO_TCP_COLLECTIVES_HPP
#define FERRO_TCP_COLLECTIVES_HPP

#include <utility>
#include <vector>

#include "ferro/call.hpp"
#include "ferro/exchange.hpp"
#include "ferro/members.hpp"
#include "ferro/pieces.hpp"
#include "ferro/scratch.hpp"
#include "ferro/types.hpp"

namespace ferro {

class TcpCollectives : public Members {
 public:
  TcpCollectives(TcpMesh& mesh, std::vector<int> ranks)
      : Members(mesh.own_rank(), std::move(ranks)), mesh_(mesh) {}

  // Any of the operations of types.hpp but barrier. Roots are ranks, as everywhere.
  void run(Call& call, const Collective& collective);
  // An allreduce whose input is queued already, to every peer.
  void reduce_all(Exchange& exchange, const Collective& collective);

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
  Scratch scratch_;  // what is received
  Scratch reduced_;  // results that have no place in an output
};

}  // namespace ferro

#endif  // FERRO_TCP_COLLECTIVES_HPP
