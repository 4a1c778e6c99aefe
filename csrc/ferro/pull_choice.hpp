// Whether the ranks of a host read the inputs of a collective where they stand, in each other's memory, or
// have them staged. Which is faster is measured (copy_choice.hpp) by one rank, which chooses for all. It says
// so one collective of the kind ahead: the others prepare their inputs before they hear of its choice.
#ifndef FERRO_PULL_CHOICE_HPP
#define FERRO_PULL_CHOICE_HPP

#include <array>
#include <bitset>
#include <vector>

#include "ferro/clock.hpp"
#include "ferro/copy_choice.hpp"
#include "ferro/shm_cost.hpp"
#include "ferro/types.hpp"

namespace ferro {

class PullChoice {
 public:
  // `place` is this rank's place among `size`, and `place_of` the place of each rank of the group.
  PullChoice(PeerReads setting, int place, int size, const std::vector<int>& place_of)
      : setting_(setting), place_(place), size_(size), place_of_(place_of) {}

  // Whether this rank's arrays are large enough for others to read them in its memory, and stay as they are
  // while others do. Only then is there a choice.
  bool is_open(const Collective& collective) const {
    return collective.nbytes() >= shm_cost::kPullNbytes && is_open_to_long(collective);
  }
  // The place of the rank that chooses for all of them.
  int chooser_of(const Collective& collective) const;
  // Whether this is that rank, and there is something to choose.
  bool is_chooser(const Collective& collective) const {
    return is_open(collective) && place_ == chooser_of(collective);
  }

  // What the rank that chooses said the last time.
  bool is_pulled(const Collective& collective) const;
  void set_pulled(const Collective& collective, bool is_pulled);

  // For the rank that chooses: whether the next one like this shall be pulled, and how long this one took.
  bool shall_pull_next(const Collective& collective) const;
  void note(const Collective& collective, bool was_pulled, Clock::duration time);

 private:
  bool is_open_to_long(const Collective& collective) const;
  static std::size_t row_of(const Collective& collective) { return static_cast<std::size_t>(collective.op); }

  const PeerReads setting_;
  const int place_, size_;
  const std::vector<int>& place_of_;
  // Of the operations before the barrier.
  static constexpr auto kNumOps = static_cast<std::size_t>(Op::barrier);
  std::array<CopyChoice, kNumOps> times_;
  std::array<std::bitset<64>, kNumOps> are_pulled_;  // by log2 of their bytes
};

}  // namespace ferro

#endif  // FERRO_PULL_CHOICE_HPP
