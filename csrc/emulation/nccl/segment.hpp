// The memory that the ranks of one communicator share, and how they wait in it.
//
// A memfd without a name, passed through a Unix socket (bootstrap.hpp): with the last
// process that has it mapped, it is gone.
#ifndef EMULATION_NCCL_SEGMENT_HPP
#define EMULATION_NCCL_SEGMENT_HPP

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "emulation/nccl/failure.hpp"

namespace emulation {

constexpr int kMaxRanks = 64;
constexpr std::size_t kStagingNbytes = std::size_t{1} << 20;
constexpr std::size_t kChannelNbytes = std::size_t{64} << 10;
constexpr std::size_t kControlNbytes = 256;
constexpr int kMaxSignals = 16;
constexpr int kMaxSignalContexts = 4;

// Streams and host threads work at the same time, and each have barriers of their own.
enum class Barrier { stream, control };

// What a rank is about to do in a collective, for the others to compare.
struct CallRecord {
  std::uint64_t sequence;
  std::uint64_t count;
  std::int32_t op;
  std::int32_t dtype;
  std::int32_t reduction;  // ranks number their pre-multiplied sums as they like: ncclNumOps for any; or -1
  std::int32_t root;
  std::int32_t is_registered;
};

// One direction between two ranks. `state` hands the rest over: only the sender writes it
// while `state` is kEmpty, only the receiver reads it while `state` is kFull.
struct alignas(64) Channel {
  enum State : std::uint32_t { kEmpty, kFull, kRefused };
  std::atomic<std::uint32_t> state;
  std::uint32_t nbytes;  // of this piece
  // Of messages: must agree.
  std::uint32_t dtype;
  std::uint64_t total_nbytes;
  // Of puts.
  std::uint64_t offset;  // in the window
  std::uint32_t window;
  std::uint32_t signal_index;
  std::uint32_t signal_context;
  std::uint32_t is_last;  // the signal is given behind this piece
  char data[kChannelNbytes];
};

struct alignas(128) RankPart {
  std::atomic<std::uint32_t> arrivals[2];  // by Barrier: how many the rank has entered
  std::atomic<pid_t> pid;                  // 0 until the rank is there; stored after start_time
  std::atomic<std::uint32_t> has_left;
  std::uint64_t start_time;  // of the process, to tell it from a later one with the same pid
  std::int32_t device;
  // What the rank has used, or begun to use, see Connections.
  std::atomic<std::uint32_t> has_reduced, has_put;
  std::atomic<std::uint32_t> sends_to[kMaxRanks], receives_from[kMaxRanks];
  CallRecord calls[2];  // by the sequence's parity: written anew only after a barrier
  char control[kControlNbytes];
};

class Segment {
 public:
  // For rank 0: makes the memory, of which `fd` is the descriptor.
  static int create(int num_ranks);
  // Maps the memory and closes `fd`.
  Segment(int fd, int rank, int num_ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Both end with Interrupted when `stop` is set, and with Failure, ncclRemoteError, when a
  // rank has died and notices_ends(); a barrier also when a rank that has not come has left.
  void barrier(Barrier which, const std::atomic<bool>& stop);
  template <class Condition>
  void await(Condition condition, const std::atomic<bool>& stop) {
    for (int turn = 0;; ++turn) {
      // Before the condition is looked at: what changes afterwards changes the bell too.
      const std::uint32_t seen = head().bell.load(std::memory_order_seq_cst);
      if (condition()) return;
      // Relaxed: nothing else is published with the flag.
      if (stop.load(std::memory_order_relaxed)) throw Interrupted{};
      try {
        pause(turn, seen);
      } catch (const Failure&) {
        if (condition()) return;  // what a rank did before it died counts
        throw;
      }
    }
  }
  // Wakes everybody who awaits something: call it after every change.
  void ring();

  // Whether FERRO_EMULATION_PEER_DEATH is remote_error: ranks are told of the end of others, as over a
  // network. Otherwise nobody notices it, as on one host with GPUs.
  static bool notices_ends();
  // This rank's communicator has ended.
  void leave();

  // Leaves every rank with what every rank gave: `all` has room for num_ranks of it.
  void exchange(const void* mine, std::size_t nbytes, void* all, const std::atomic<bool>& stop);

  RankPart& part(int rank);
  char* staging(int rank);
  Channel& message(int src, int dst) { return channel(0, src, dst); }
  Channel& put(int src, int dst) { return channel(1, src, dst); }
  // How many signals of `src` have come in at `dst`.
  std::atomic<std::uint32_t>& signals(int dst, int src, int index, int context);

  const int rank;
  const int num_ranks;

 private:
  struct Head {
    std::atomic<std::uint32_t> bell;
  };
  Head& head() { return *reinterpret_cast<Head*>(base_); }
  Channel& channel(int kind, int src, int dst);
  void pause(int turn, std::uint32_t seen);
  void look_for_dead_ranks();

  char* base_ = nullptr;
  std::size_t nbytes_ = 0;
};

std::uint64_t start_time_of(pid_t pid);  // 0 if there is no such process, or it is a zombie

}  // namespace emulation

#endif  // EMULATION_NCCL_SEGMENT_HPP
