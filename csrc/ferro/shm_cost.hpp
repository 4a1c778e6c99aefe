// The constants behind the choice of a shared-memory algorithm. ALGORITHMS.md
// has the model they come from, and how they were measured.
#ifndef FERRO_SHM_COST_HPP
#define FERRO_SHM_COST_HPP

#include <algorithm>
#include <cstddef>

namespace ferro::shm_cost {

// Moving up to this much takes about a microsecond: not worth letting go of the interpreter's lock.
constexpr std::size_t kBriefNbytes = std::size_t{8} << 10;

// Payloads that are moved to the shared cache for their readers. More lines than that keep the writer
// longer than they save the readers. So does any with messages, whose receiver waits from the start.
constexpr bool is_worth_handing_over(std::size_t nbytes) { return nbytes <= std::size_t{2} << 10; }

// Payloads whose place is fetched before it is written, while peers are waited for: enough lines for it
// to show, and few enough to stay in the first-level cache.
constexpr bool is_worth_preparing(std::size_t nbytes) {
  return nbytes >= std::size_t{4} << 10 && nbytes <= std::size_t{16} << 10;
}

// From here on reading a peer's symmetric array in place beats copying it, in spite
// of the fence that must follow.
constexpr std::size_t kSymmetricNbytes = std::size_t{8} << 10;

// The same for a broadcast. Its input is what the root has just written, or taken from an earlier broadcast:
// then both ranks hold lines that the other wants, and staging is faster for longer. Several readers, which
// read in place side by side but go through the root's window together, gain sooner.
constexpr std::size_t symmetric_broadcast_nbytes(int num_ranks) {
  return num_ranks == 2 ? std::size_t{2} << 20 : std::size_t{512} << 10;
}

// From here on what one rank copies from another may be pulled out of that one's memory. It costs a system
// call for each reader, and the fence: smaller copies would not repay that anywhere.
constexpr std::size_t kPullNbytes = std::size_t{16} << 10;

// The same for a reduce_scatter, which lends nothing unseen; and for a broadcast, whose root could return
// once it has staged, above all if it has nothing to copy for itself.
constexpr std::size_t kPullReducedNbytes = std::size_t{128} << 10;
constexpr std::size_t kPullBroadcastNbytes = std::size_t{128} << 10;
constexpr std::size_t kPullNoCopyNbytes = std::size_t{2} << 20;

// The same for the input of an allreduce. Each rank reduces a share and takes the other results: shorter
// inputs are read from the windows just as fast, since they are still in the peer's cache. Two ranks may
// both reduce all of it instead, which takes no second fence.
constexpr std::size_t kPullSharesNbytes = std::size_t{1} << 20;
constexpr std::size_t kPullWholeNbytes = std::size_t{256} << 10;
static_assert(kPullNbytes <= std::min({kPullReducedNbytes, kPullBroadcastNbytes, kPullNoCopyNbytes,
                                       kPullSharesNbytes, kPullWholeNbytes}),
              "below the least of them, PullChoice::is_open and ShmTransport::publish_input look no further");
constexpr bool pulling_whole_wins(std::size_t nbytes, int num_ranks) {
  return num_ranks == 2 && nbytes < std::size_t{2} << 20;
}

// Messages from here on are lent to their receivers. A system call must repay itself; symmetric memory is
// read without, and shorter messages from there reach a receiver that lags behind in less time through the
// ring.
constexpr std::size_t kLentNbytes = std::size_t{16} << 10;
constexpr std::size_t kLentSymmetricNbytes = std::size_t{4} << 10;

// Per byte and rank, one-shot costs w + (p - 1) r, two-shot w + 2 (p - 1) / p r
// with one more wait a round: for two ranks the first is never dearer.
constexpr std::size_t kOneShotNbytes = std::size_t{64} << 10;
constexpr bool one_shot_wins(std::size_t nbytes, int num_ranks) {
  return num_ranks <= 2 || nbytes <= kOneShotNbytes;
}

// How much a rank stages for one reader in one round, of `nbytes` in all. Small enough that
// the first round comes soon, large enough that there are few rounds to wait for.
constexpr std::size_t piece_nbytes(std::size_t nbytes) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  return nbytes < kMiB ? kMiB / 16 : nbytes < 2 * kMiB ? kMiB / 8 : kMiB / 4;
}

}  // namespace ferro::shm_cost

#endif  // FERRO_SHM_COST_HPP
