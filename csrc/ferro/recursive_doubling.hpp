// Recursive doubling: pairs of ranks combine what they have, at distances 1, 2, 4 and so on, until
// each rank has what all had. Ranks beyond a power of two first hand theirs to a neighbour, and get
// the result from it. ceil(log2 p) steps, one or two more if p is no power of two.
#ifndef FERRO_RECURSIVE_DOUBLING_HPP
#define FERRO_RECURSIVE_DOUBLING_HPP

#include <vector>

namespace ferro {

// One step, as one rank takes it. When a pair combines what it has, the lower rank's comes first.
struct DoublingStep {
  int peer;
  bool sends;
  bool receives;
  bool is_result;  // what is received replaces what this rank has
};

// The steps of rank `index` of `num_ranks`, in order.
inline std::vector<DoublingStep> doubling_steps(int num_ranks, int index) {
  int power = 1;
  while (2 * power <= num_ranks) power *= 2;
  const int extra = num_ranks - power;
  const bool is_paired = index < 2 * extra;
  if (is_paired && index % 2 == 0) return {{index + 1, true, false, false}, {index + 1, false, true, true}};
  std::vector<DoublingStep> steps;
  if (is_paired) steps.push_back({index - 1, false, true, false});
  const int place = is_paired ? index / 2 : index - extra;
  for (int distance = 1; distance < power; distance *= 2) {
    const int other = place ^ distance;
    steps.push_back({other < extra ? 2 * other + 1 : other + extra, true, true, false});
  }
  if (is_paired) steps.push_back({index - 1, true, false, false});
  return steps;
}

}  // namespace ferro

#endif  // FERRO_RECURSIVE_DOUBLING_HPP
