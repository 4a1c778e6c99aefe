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

// A small payload that rides on the frames of an agreement, so that both take one
// round. It is kept apart from the user's arrays until all have agreed.
class Rider {
 public:
  virtual ~Rider() = default;
  // What this rank has to contribute now, of size nbytes(); null if nothing.
  virtual const void* data() const = 0;
  virtual std::size_t nbytes() const = 0;
  // Combines what ranks contributed, in their order; null stands for nothing.
  // data() may be among the sources.
  virtual void combine(const std::vector<const void*>& sources) = 0;
};

// An array of partial results that is reduced on its way.
class ReductionRider final : public Rider {
 public:
  // `accumulator` holds this rank's contribution and will hold the result. MEAN is left undivided.
  ReductionRider(void* accumulator, DType partial, ReduceOp op, std::size_t count);
  const void* data() const override { return accumulator_; }
  std::size_t nbytes() const override { return count_ * item_size(partial_); }
  void combine(const std::vector<const void*>& sources) override;

 private:
  void* accumulator_;
  DType partial_;
  std::size_t count_;
  ReduceKernel kernel_;
};

// An array that one rank has and all will have.
class BroadcastRider final : public Rider {
 public:
  BroadcastRider(void* array, std::size_t nbytes, bool is_known)
      : array_(array), nbytes_(nbytes), is_known_(is_known) {}
  const void* data() const override { return is_known_ ? array_ : nullptr; }
  std::size_t nbytes() const override { return nbytes_; }
  void combine(const std::vector<const void*>& sources) override;

 private:
  void* array_;
  std::size_t nbytes_;
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
