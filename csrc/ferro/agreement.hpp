// What is known about whether ranks called the same collective.
#ifndef FERRO_AGREEMENT_HPP
#define FERRO_AGREEMENT_HPP

#include "ferro/error.hpp"
#include "ferro/fingerprint.hpp"

namespace ferro {

// The verdict over some set of ranks, in constant space: what its lowest rank
// called, and the lowest rank that called anything else. Merging is commutative,
// associative and idempotent, so the ranks' verdicts may be combined in any order,
// more than once, and all end with the same pair of culprits.
struct Agreement {
  enum class State : std::uint8_t {
    agreed,
    disagreed,  // first and second called different collectives
    unpaired,   // all_to_all: first.count elements sent to second, which expects second.count
  };

  State state = State::agreed;
  int first_rank = 0;
  int second_rank = 0;
  Fingerprint first;
  Fingerprint second;

  static Agreement of(int rank, const Fingerprint& fingerprint);
  // `sender` sends `receiver` a number of elements other than the one it expects.
  static Agreement unpaired(const Fingerprint& fingerprint, int sender, std::uint64_t sent, int receiver,
                            std::uint64_t expected);

  void merge(const Agreement& other);

  // Throws Error{mismatch} unless all ranks agreed.
  void check(int own_rank) const;

 private:
  void consider(int rank, const Fingerprint& fingerprint);
};

}  // namespace ferro

#endif  // FERRO_AGREEMENT_HPP
