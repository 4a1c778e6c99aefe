// Which algorithm carries which size over TCP: every threshold of tcp_*.cpp and
// hosts_transport.cpp is here. ALGORITHMS.md has the steps and the sources.
//
// The choice must be the same on all ranks: it depends on the number of ranks and
// on bytes that all of them agreed on, never on anything measured at run time.
#ifndef FERRO_TCP_COST_HPP
#define FERRO_TCP_COST_HPP

#include <algorithm>
#include <cstddef>

#include "ferro/fingerprint.hpp"
#include "ferro/frame.hpp"

namespace ferro {

// Microseconds, measured over loopback; networks are slower in about the same proportion.
struct TcpCost {
  double step = 8;       // one message to a rank that waits for it (alpha)
  double message = 1.5;  // each further message of the same step: its system calls
  double byte = 2e-4;    // beta
  double reduced_byte = 2e-5;
};
constexpr TcpCost kTcpCost{};

constexpr int steps_of(int num_ranks) {
  int steps = 0;
  while ((1 << steps) < num_ranks) ++steps;
  return steps;
}

// A step in which each rank sends to every other and receives `nbytes` in all.
constexpr double direct_cost(int num_ranks, double nbytes) {
  return kTcpCost.step + (num_ranks - 2) * kTcpCost.message + nbytes * kTcpCost.byte;
}

// Up to here headers go from every rank to every rank, in one step; above, by recursive doubling.
constexpr int kDirectRanks = 8;

// The largest piece that travels in the frame of the header, so that agreeing and
// moving are one step. Limited, so that what a rank receives does not wait long before it is checked.
constexpr std::size_t inline_limit(int num_ranks) {
  return num_ranks <= kDirectRanks ? kMaxInlineNbytes / static_cast<std::size_t>(std::max(num_ranks - 1, 1))
                                   : std::size_t{8} << 10;
}

// Between two ranks, an allreduce that is too large for its header but not larger than this
// sends its input right behind the header, before it knows what the peer called: the copy
// fills the time until the peer's header arrives. Ranks that disagree have to read the input
// and throw it away, hence the limit; and larger arrays would gain nothing by a head start.
constexpr std::size_t kEagerNbytes = std::size_t{512} << 10;

// How much a rank that made this call sends eagerly.
inline std::size_t eager_nbytes(const Fingerprint& fingerprint, int num_ranks) {
  if (num_ranks != 2 || fingerprint.op != Op::allreduce) return 0;
  const std::size_t itemsize = item_size(fingerprint.dtype), count = fingerprint.count;
  return count > inline_limit(num_ranks) / itemsize && count <= kEagerNbytes / itemsize ? count * itemsize
                                                                                        : 0;
}

enum class AllreduceAlgorithm { one_shot, recursive_doubling, reduce_scatter_all_gather };

// `nbytes` is the size of one rank's input, `partial_nbytes` its size as partial results.
constexpr AllreduceAlgorithm choose_allreduce(int num_ranks, double nbytes, double partial_nbytes) {
  // Both then move equally many bytes, and what two-shot saves in reductions it loses
  // by reading its results from memory once more, to send them.
  if (num_ranks == 2) return AllreduceAlgorithm::one_shot;
  const double others = num_ranks - 1;
  const double one_shot =
      direct_cost(num_ranks, others * nbytes) + num_ranks * nbytes * kTcpCost.reduced_byte;
  const bool is_power_of_two = (num_ranks & (num_ranks - 1)) == 0;
  const double steps = steps_of(num_ranks) + (is_power_of_two ? 0 : 1);
  const double doubling =
      steps * (kTcpCost.step + partial_nbytes * (kTcpCost.byte + 2 * kTcpCost.reduced_byte));
  const double two_shot =
      2 * direct_cost(num_ranks, others / num_ranks * nbytes) + nbytes * kTcpCost.reduced_byte;
  if (one_shot <= doubling && one_shot <= two_shot) return AllreduceAlgorithm::one_shot;
  return doubling <= two_shot ? AllreduceAlgorithm::recursive_doubling
                              : AllreduceAlgorithm::reduce_scatter_all_gather;
}

enum class BroadcastAlgorithm { binomial, chain, scatter_all_gather };

// How much a rank of a chain passes on at a time.
constexpr std::size_t kChainSegmentNbytes = std::size_t{128} << 10;

constexpr BroadcastAlgorithm choose_broadcast(int num_ranks, double nbytes) {
  const double others = num_ranks - 1;
  const double binomial = steps_of(num_ranks) * (kTcpCost.step + nbytes * kTcpCost.byte);
  const double segment = std::min(nbytes, static_cast<double>(kChainSegmentNbytes));
  const double chain = others * kTcpCost.step + (nbytes + (others - 1) * segment) * kTcpCost.byte;
  const double scatter = 2 * direct_cost(num_ranks, others / num_ranks * nbytes);
  if (binomial <= chain && binomial <= scatter) return BroadcastAlgorithm::binomial;
  return chain <= scatter ? BroadcastAlgorithm::chain : BroadcastAlgorithm::scatter_all_gather;
}

// Whether the root of a reduce takes everything itself, or each rank reduces a part first.
constexpr bool is_reduce_direct(int num_ranks, double nbytes) {
  const double others = num_ranks - 1;
  const double direct = direct_cost(num_ranks, others * nbytes) + num_ranks * nbytes * kTcpCost.reduced_byte;
  return direct <= 2 * direct_cost(num_ranks, others / num_ranks * nbytes) + nbytes * kTcpCost.reduced_byte;
}

// Whether all_gather doubles what it has at each step (Bruck) instead of sending to everybody.
constexpr bool is_all_gather_doubling(int num_ranks, double nbytes_per_rank) {
  const double total = (num_ranks - 1) * nbytes_per_rank;
  const double doubling = steps_of(num_ranks) * kTcpCost.step + total * kTcpCost.byte;
  // Doubling also copies everything once more, to rotate it into place.
  return doubling + total * kTcpCost.reduced_byte < direct_cost(num_ranks, total);
}

// The ring of slots through which peers' data reaches the reduction: small enough
// to stay in the cache, enough to receive one slot while another is reduced.
constexpr std::size_t kReduceSlots = 4;
// Short arrays are cut into a few segments, so that reducing begins early.
constexpr std::size_t reduce_segment_nbytes(int num_ranks, std::size_t nbytes) {
  const std::size_t whole = std::clamp(nbytes / 4, std::size_t{128} << 10, std::size_t{512} << 10);
  return std::max(whole / static_cast<std::size_t>(std::max(num_ranks - 1, 1)), std::size_t{16} << 10);
}

}  // namespace ferro

#endif  // FERRO_TCP_COST_HPP
