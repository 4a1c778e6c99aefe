// The constants behind the choice of a shared-memory algorithm. ALGORITHMS.md
// has the model they come from, and how they were measured.
#ifndef FERRO_SHM_COST_HPP
#define FERRO_SHM_COST_HPP

#include <cstddef>

namespace ferro::shm_cost {

// Up to this much is moved in about a microsecond: not worth letting go of a lock for.
constexpr std::size_t kBriefNbytes = std::size_t{8} << 10;

// From here on reading a peer's symmetric array where it stands beats copying it,
// in spite of the fence that must follow.
constexpr std::size_t kSymmetricNbytes = std::size_t{8} << 10;

// From here on what one rank copies from one other may be pulled out of that one's memory: three
// system calls to lend it, one for each reader, and the fence, which less would not repay anywhere.
constexpr std::size_t kPullNbytes = std::size_t{128} << 10;

// The same for what is reduced, of a rank's whole input: it is fetched first, and an allreduce has a
// second fence. Inputs that fit into the windows, in the peer's cache still, are as fast through those.
constexpr std::size_t kPullReducedNbytes = std::size_t{2} << 20;

// Per byte and rank, one-shot costs w + (p - 1) r, two-shot w + 2 (p - 1) / p r
// with one more wait a round: for two ranks the first is never dearer.
constexpr std::size_t kOneShotNbytes = std::size_t{64} << 10;
constexpr bool one_shot_wins(std::size_t nbytes, int num_ranks) {
  return num_ranks <= 2 || nbytes <= kOneShotNbytes;
}

// What a rank stages for one reader in one round, of `nbytes` in all. Small enough that
// the first round comes soon, large enough that waiting for the last costs little.
constexpr std::size_t piece_nbytes(std::size_t nbytes) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  return nbytes < kMiB ? kMiB / 16 : nbytes < 2 * kMiB ? kMiB / 8 : kMiB / 4;
}

}  // namespace ferro::shm_cost

#endif  // FERRO_SHM_COST_HPP
