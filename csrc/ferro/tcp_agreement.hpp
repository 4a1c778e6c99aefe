// How the ranks of a mesh find out, before any of them touches a buffer, whether
// they all called the same collective.
#ifndef FERRO_TCP_AGREEMENT_HPP
#define FERRO_TCP_AGREEMENT_HPP

#include <cstddef>
#include <vector>

#include "ferro/agreement.hpp"
#include "ferro/exchange.hpp"
#include "ferro/kernels.hpp"
#include "ferro/members.hpp"

namespace ferro {

// A small array that rides on the frames of an agreement, so that both take one round. It is
// kept apart from the user's arrays until all have agreed.
class Rider {
 public:
  // `array` has room for the partial result of `collective`: a broadcast, an allreduce or a reduce. If
  // `is_known`, it holds what this rank contributes, as it does for each rank of a reduction. In the end
  // it holds the result; MEAN is left undivided.
  Rider(const Collective& collective, void* array, bool is_known);
  // What this rank has to contribute now, of size nbytes(); null if nothing.
  const void* data() const { return is_known_ ? array_ : nullptr; }
  std::size_t nbytes() const { return count_ * item_size(partial_); }
  // Combines what ranks contributed, in their order; null stands for nothing.
  // data() may be among the sources.
  void combine(const std::vector<const void*>& sources);

 private:
  void* array_;
  DType partial_;
  std::size_t count_;
  ReduceKernel kernel_;  // null for a broadcast
  bool is_known_;
};

// Once all have agreed: gives this rank its output, from the `array` that has ridden to it, which is the
// root's of a broadcast, else the partial result over all `num_ranks`. That is overwritten.
void deliver_riding(Call& call, const Collective& collective, void* array, int own_rank, int num_ranks);

// The verdict of all members, the same on each. The order of messages depends on
// the number of members alone, so that ranks meet whatever they called: every rank
// to every rank for a few, recursive doubling for many. `rider` may be null; what
// it holds in the end is meaningful only if all agreed.
Agreement agree(Exchange& exchange, const Members& group, Agreement own, Rider* rider);

// For an uneven all_to_all on which all agreed: whether what each rank sends is
// what its receiver expects.
Agreement agree_on_counts(Exchange& exchange, const Members& group, const Agreement& agreed,
                          const Collective& collective);

}  // namespace ferro

#endif  // FERRO_TCP_AGREEMENT_HPP
