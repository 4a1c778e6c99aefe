#include "ferro/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>

#include "ferro/background_thread.hpp"
#include "ferro/pages.hpp"
#include "ferro/parking.hpp"
#include "ferro/unique_fd.hpp"

namespace ferro {
namespace {

// A process may address 128 TiB, and hold many groups.
constexpr std::size_t kMaxHeaps = std::size_t{2} << 40;
// With more, a rank's share of a two-shot round would be less than a line pair; and no machine has
// room for so many.
constexpr int kMaxRanks = 1024;

std::size_t memory_of_machine() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

std::size_t power_of_two_at_least(std::size_t n) {
  std::size_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// 0 where the system does not tell.
std::size_t address_space_in_use() {
  std::size_t num_pages = 0;
  std::ifstream("/proc/self/statm") >> num_pages;
  return num_pages * sysconf(_SC_PAGESIZE);
}

// How much address space the heaps of one group may take together. `ulimit -v` may leave little, and
// the program and other groups want most of that.
std::size_t most_heaps_nbytes() {
  const std::size_t most = std::max(kMaxHeaps, power_of_two_at_least(memory_of_machine()));
  struct rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return most;
  const std::size_t in_use = address_space_in_use();
  return limit.rlim_cur <= in_use ? 0 : std::min<std::size_t>(most, (limit.rlim_cur - in_use) / 4);
}

// No rank can fill more than the machine's memory, so no heap need be larger. One huge page is
// added, so that the distance of two heaps is no power of two: else equal offsets in them collide
// in the first-level cache of some processors. ALGORITHMS.md says what that cost.
std::size_t heap_nbytes_for(int size) {
  const std::size_t most = most_heaps_nbytes();
  std::size_t heap = power_of_two_at_least(memory_of_machine());
  while (heap * size > most && heap > kHugePage) heap /= 2;
  return heap + kHugePage;
}

// That of each rank in a segment whose size is `total_nbytes`; 0 if it is none for `size` ranks.
std::size_t heap_nbytes_in(std::size_t total_nbytes, int size) {
  const std::size_t before = SegmentLayout(size, 0).heaps_offset;
  if (total_nbytes < before || (total_nbytes - before) % size != 0) return 0;
  return (total_nbytes - before) / size;
}

[[noreturn]] void throw_no_address_space(std::size_t nbytes) {
  if (errno != ENOMEM) throw_errno("mmap of shared memory");
  throw Error(ErrorCode::out_of_memory, -1,
              "no room in the address space for a group's " + std::to_string(nbytes >> 20) +
                  " MiB: close other groups, or raise the limit (ulimit -v)");
}

// Without this the kernel of a machine short of memory would kill whoever touches a page first.
void allocate(int fd, std::size_t offset, std::size_t nbytes) {
  // At a signal, even one that is handled, older kernels give up and undo what they have done. Those that
  // cannot be blocked, a debugger's for one, are rare enough to begin again.
  const BlockedSignals blocked;
  while (fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) != 0)
    if (errno != EINTR) throw_errno("fallocate of shared memory");
}

// Sizes grow with the square of the number of ranks. Backing more memory than there is would
// end in the kernel killing some process, not in an error.
void check_that_ranks_fit(int size) {
  if (size > kMaxRanks)
    throw Error(ErrorCode::unsupported, -1,
                "at most " + std::to_string(kMaxRanks) + " ranks of one host share memory, not " +
                    std::to_string(size));
  if (SegmentLayout(size, 0).heaps_offset <= memory_of_machine() / 2) return;
  throw Error(ErrorCode::out_of_memory, -1,
              std::to_string(size) + " ranks on one host need more shared memory than half of its memory");
}

}  // namespace

SegmentLayout::SegmentLayout(int num_ranks, std::size_t nbytes_of_heap)
    : size(num_ranks), heap_nbytes(nbytes_of_heap) {
  const auto p = static_cast<std::size_t>(num_ranks);
  const bool is_alone = p == 1;  // then no array is staged, and groups of one are made quickly
  // One header must be able to publish an uneven all_to_all's two rows of counts.
  small_nbytes = std::max(is_alone ? 0 : std::size_t{p <= 8 ? 64u : 16u} << 10,
                          round_up(2 * sizeof(std::uint64_t) * p, kLinePair));
  small_ring_nbytes = small_nbytes * kSmallSlots;
  // Larger than a second-level cache: see "Rings" in ALGORITHMS.md. Many ranks share theirs anyway.
  window_nbytes = is_alone ? std::size_t{4} << 10 : std::size_t{p <= 8 ? 2u : 1u} << 20;
  results_nbytes = round_up(window_nbytes / p, 4096);
  channel_nbytes = std::max(std::size_t{16} << 10, power_of_two_at_least((std::size_t{4} << 20) / p));

  std::size_t end = sizeof(GroupControl);
  const auto place = [&end](std::size_t nbytes, std::size_t alignment) {
    const std::size_t offset = round_up(end, alignment);
    end = offset + nbytes;
    return offset;
  };
  sleepers_offset = place(2 * p * sizeof(std::uint32_t), kLinePair);
  headers_offset = place(2 * p * sizeof(HeaderSlot), kLinePair);
  controls_offset = place(p * sizeof(RankControl), kLinePair);
  small_rings_offset = place(p * small_ring_nbytes, 4096);
  windows_offset = place(p * window_nbytes, 4096);
  results_offset = place(p * results_nbytes, 4096);
  channels_offset = place(p * (p - 1) * channel_stride(), 4096);
  heaps_offset = round_up(end, kHugePage);
}

std::size_t SegmentLayout::channel_stride() const {
  return sizeof(ChannelControl) + kCells * sizeof(Cell) + channel_nbytes;
}

int Segment::create_file(int size) {
  check_that_ranks_fit(size);
  UniqueFd file(memfd_create("ferro_dist", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) throw_errno("memfd_create");
  const SegmentLayout layout(size, heap_nbytes_for(size));
  if (ftruncate(file.get(), static_cast<off_t>(layout.total_nbytes())) != 0)
    throw_errno("ftruncate of shared memory");
  allocate(file.get(), 0, layout.small_rings_offset);
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) throw_errno("fcntl(F_ADD_SEALS)");
  return file.release();
}

std::shared_ptr<Segment> Segment::map(int fd, int size) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw_errno("fstat of shared memory");
  const SegmentLayout layout(size, heap_nbytes_in(status.st_size, size));
  if (layout.heap_nbytes == 0)
    throw Error(ErrorCode::io, -1, "the shared segment is not one for " + std::to_string(size) + " ranks");
  void* base =
      mmap(nullptr, layout.total_nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) throw_no_address_space(layout.total_nbytes());
  // Best effort: without huge pages the first touch of each small one costs a fault.
  madvise(base, layout.total_nbytes(), MADV_HUGEPAGE);
  return std::shared_ptr<Segment>(new Segment(static_cast<unsigned char*>(base), layout));
}

void Segment::back_place(int fd, int place) {
  const std::size_t page = sysconf(_SC_PAGESIZE);
  const auto back = [&](std::size_t section, std::size_t nbytes_each) {
    if (nbytes_each == 0) return;  // the channels of a rank that is alone
    const std::size_t first = (section + place * nbytes_each) / page * page;
    const std::size_t nbytes = section + (place + 1) * nbytes_each - first;
    // Populating through a mapping gives huge pages where the system has them for shared memory.
    madvise(base_ + first, nbytes, kPopulateWrite);
    allocate(fd, first, nbytes);
  };
  back(layout_.small_rings_offset, layout_.small_ring_nbytes);
  back(layout_.windows_offset, layout_.window_nbytes);
  back(layout_.results_offset, layout_.results_nbytes);
  back(layout_.channels_offset, layout_.channel_stride() * (size() - 1));
}

std::shared_ptr<Segment> Segment::map_file(int fd, int size, int place) {
  std::shared_ptr<Segment> segment = map(fd, size);
  segment->back_place(fd, place);
  return segment;
}

std::shared_ptr<Segment> Segment::create(int size) {
  const UniqueFd file(create_file(size));
  std::shared_ptr<Segment> segment = map(file.get(), size);
  for (int place = 0; place < size; ++place) segment->back_place(file.get(), place);
  return segment;
}

void Segment::abort(AbortReason reason) noexcept {
  std::uint64_t well = 0;
  abort_word().compare_exchange_strong(well, reason.pack(), std::memory_order_seq_cst);
  // The reason first, then the words: a rank that sets its word after this looks
  // at the reason before it sleeps.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // Whoever lost the exchange wakes the sleepers all the same, even those whose word is already
  // clear: the rank that was to wake them may have died just before it did.
  for (int place = 0; place < size(); ++place) {
    for (std::atomic<std::uint32_t>* word : {&collective_sleeper(place), &message_sleeper(place)}) {
      word->store(kAwake, std::memory_order_seq_cst);
      futex_wake_all(*word);
    }
  }
}

Segment::~Segment() { munmap(base_, layout_.total_nbytes()); }

}  // namespace ferro
