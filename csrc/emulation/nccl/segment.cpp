#include "emulation/nccl/segment.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>

#include "emulation/environment.hpp"

namespace emulation {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kYields = 20;
constexpr long kSleepNs = 20'000'000;  // how late an abort of this process may be seen

std::size_t round_up(std::size_t value) { return (value + kPage - 1) / kPage * kPage; }

// Where each part begins, as a function of the number of ranks.
struct Layout {
  explicit Layout(int num_ranks) {
    const auto n = static_cast<std::size_t>(num_ranks);
    parts = kPage;
    signals = parts + round_up(n * sizeof(RankPart));
    channels = signals + round_up(n * n * kMaxSignals * kMaxSignalContexts * sizeof(std::uint32_t));
    staging = channels + round_up(2 * n * n * sizeof(Channel));
    end = staging + n * kStagingNbytes;
  }
  std::size_t parts, signals, channels, staging, end;
};

}  // namespace

bool Segment::notices_ends() {
  static const bool does = [] {
    const std::string text = setting("PEER_DEATH");
    if (text.empty() || text == "hang") return false;
    if (text != "remote_error") die("FERRO_EMULATION_PEER_DEATH is '", text, "', not hang or remote_error");
    return true;
  }();
  return does;
}

void Segment::leave() {
  // Release: whoever sees it sees the last arrivals, too.
  part(rank).has_left.store(1, std::memory_order_release);
  ring();
}

int Segment::create(int num_ranks) {
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "ferro-emulated-nccl", 1u /* MFD_CLOEXEC */));
  require(fd >= 0, ncclSystemError, "cannot make a memfd: ", std::strerror(errno));
  if (ftruncate(fd, static_cast<off_t>(Layout(num_ranks).end)) != 0) {
    close(fd);
    fail(ncclSystemError, "cannot size a memfd: ", std::strerror(errno));
  }
  return fd;
}

Segment::Segment(int fd, int rank, int num_ranks)
    : rank(rank), num_ranks(num_ranks), nbytes_(Layout(num_ranks).end) {
  void* mapped = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  require(mapped != MAP_FAILED, ncclSystemError, "cannot map shared memory: ", std::strerror(errno));
  base_ = static_cast<char*>(mapped);
  part(rank).start_time = start_time_of(getpid());
  part(rank).pid.store(getpid(), std::memory_order_release);
}

Segment::~Segment() { munmap(base_, nbytes_); }

RankPart& Segment::part(int of_rank) {
  return reinterpret_cast<RankPart*>(base_ + Layout(num_ranks).parts)[of_rank];
}

char* Segment::staging(int of_rank) {
  return base_ + Layout(num_ranks).staging + static_cast<std::size_t>(of_rank) * kStagingNbytes;
}

Channel& Segment::channel(int kind, int src, int dst) {
  const int index = (kind * num_ranks + src) * num_ranks + dst;
  return reinterpret_cast<Channel*>(base_ + Layout(num_ranks).channels)[index];
}

std::atomic<std::uint32_t>& Segment::signals(int dst, int src, int index, int context) {
  const int at = ((dst * num_ranks + src) * kMaxSignals + index) * kMaxSignalContexts + context;
  return reinterpret_cast<std::atomic<std::uint32_t>*>(base_ + Layout(num_ranks).signals)[at];
}

void Segment::barrier(Barrier which, const std::atomic<bool>& stop) {
  const auto index = static_cast<std::size_t>(which);
  // Release: whoever passes the barrier (acquire below) sees what was written before it.
  const std::uint32_t mine = part(rank).arrivals[index].fetch_add(1, std::memory_order_acq_rel) + 1;
  ring();
  for (int peer = 0; peer < num_ranks; ++peer) {
    await(
        [&] {
          const bool has_left = part(peer).has_left.load(std::memory_order_acquire) != 0;
          const std::uint32_t theirs = part(peer).arrivals[index].load(std::memory_order_acquire);
          const bool has_come = static_cast<std::int32_t>(theirs - mine) >= 0;
          require(has_come || !has_left || !notices_ends(), ncclRemoteError, "rank ", peer,
                  " has ended its communicator");
          return has_come;
        },
        stop);
  }
}

void Segment::exchange(const void* mine, std::size_t nbytes, void* all, const std::atomic<bool>& stop) {
  std::memcpy(part(rank).control, mine, nbytes);
  barrier(Barrier::control, stop);
  for (int peer = 0; peer < num_ranks; ++peer) {
    std::memcpy(static_cast<char*>(all) + static_cast<std::size_t>(peer) * nbytes, part(peer).control,
                nbytes);
  }
  barrier(Barrier::control, stop);  // only then may the next exchange overwrite it
}

void Segment::ring() {
  head().bell.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &head().bell, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

void Segment::pause(int turn, std::uint32_t seen) {
  if (turn < kYields) {
    sched_yield();
    return;
  }
  if (notices_ends()) look_for_dead_ranks();
  timespec limit{0, kSleepNs};
  // Not PRIVATE: ranks are processes, or threads.
  syscall(SYS_futex, &head().bell, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void Segment::look_for_dead_ranks() {
  for (int peer = 0; peer < num_ranks; ++peer) {
    const RankPart& other = part(peer);
    const pid_t pid = other.pid.load(std::memory_order_acquire);
    if (pid != 0 && start_time_of(pid) != other.start_time) {
      fail(ncclRemoteError, "rank ", peer, " (process ", pid, ") is gone");
    }
  }
}

std::uint64_t start_time_of(pid_t pid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return 0;
  char text[1024];
  const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[length] = '\0';
  // The name in brackets may hold anything: fields are counted from its end.
  const char* after_name = std::strrchr(text, ')');
  char state = 'X';
  unsigned long long start = 0;
  if (after_name == nullptr ||
      std::sscanf(after_name + 1,
                  " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
                  &start) != 2) {
    return 0;
  }
  return state == 'Z' || state == 'X' ? 0 : start;
}

}  // namespace emulation
