// The memory that the ranks of one host share: who may write what, and where.
//
// Each rank has a place in it, counted from 0. Here, in shm_*, in peer_memory and in watchdog, `place`,
// `peer`, `src` and `dst` are places, and so is what a word in the segment names. Abort reasons, and the
// ranks awaited in a RankControl, are ranks of the group; so are the peers of a Messenger.
#ifndef FERRO_SEGMENT_HPP
#define FERRO_SEGMENT_HPP

#include <linux/futex.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "ferro/fingerprint.hpp"
#include "ferro/testimony.hpp"

namespace ferro {

constexpr std::size_t kCacheLine = 64;
// Prefetchers fetch lines in pairs: what different ranks write is kept two lines apart.
constexpr std::size_t kLinePair = 2 * kCacheLine;

// What all ranks write, by compare-and-swap.
struct GroupControl {
  std::atomic<std::uint64_t> abort;  // AbortReason::pack() of the first reason; 0 while the group is well
  std::atomic<std::uint32_t> succession;  // who decided which ranks go on: Transport::succession
};

// What a rank publishes to start a collective. The flag is stored last, but stands
// first: whoever sees it carry sequence s may read all that the rank wrote for s,
// without a lock. Its offset is fixed, since behind a payload of varying length old
// data could look like a newer number.
struct alignas(kLinePair) HeaderSlot {
  static constexpr std::size_t kInlineNbytes = 56;
  std::atomic<std::uint64_t> flag;  // flag_of(sequence, hash of the fingerprint)
  unsigned char payload[kInlineNbytes];
};

constexpr std::uint64_t flag_of(std::uint32_t sequence, std::uint32_t low) {
  return static_cast<std::uint64_t>(sequence) << 32 | low;
}
constexpr std::uint32_t sequence_of(std::uint64_t flag) { return static_cast<std::uint32_t>(flag >> 32); }

// What one rank writes and all read. Counters only grow, over all collectives
// of the group, so that none ever has to be reset.
struct RankControl {
  // Read only after a mismatch, and so on cache lines of its own, which peers otherwise never fetch.
  alignas(kLinePair) Fingerprint fingerprints[2];
  alignas(kLinePair) std::atomic<std::uint64_t> staged;    // rounds whose input is in its window
  alignas(kLinePair) std::atomic<std::uint64_t> reduced;   // rounds whose result is in its results
  alignas(kLinePair) std::atomic<std::uint64_t> consumed;  // rounds read from every peer
  // The id of a thread of its process; marked and woken by the kernel when that ends.
  alignas(kLinePair) std::atomic<std::uint32_t> liveness;
  std::atomic<std::uint32_t> has_departed;  // closed its side, having published all it ever will
  // What it says of its waits if the group spans hosts; else, if it gave up, who is missing.
  // Written once, by whoever sets is_testifying; read only after has_testified is set.
  alignas(kLinePair) std::atomic<std::uint32_t> is_testifying;
  std::atomic<std::uint32_t> has_testified;
  Testimony testimony;
  // What its program sleeps for: parked_for() the rank whose message it awaits, or that a collective is done.
  // These inform, and order nothing.
  alignas(kLinePair) std::atomic<std::uint32_t> awaited_in_messages;
  std::atomic<std::uint32_t> is_waiting_for_collective;
  std::atomic<std::uint32_t> has_several_callers;  // then its program may do something else
  // What peers need to read its memory, and a number in it that proves they can: PeerMemory. Written
  // once, `number` last.
  alignas(kLinePair) std::atomic<std::uint64_t> number;
  const std::uint64_t* number_at;
  std::int32_t pid;

  bool is_dead() const { return (liveness.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0; }
  // If so, what it published before can be seen from here on.
  bool has_left() const { return has_departed.load(std::memory_order_acquire) != 0; }
};

// A payload for which its cell has no room. It goes through the ring; the rest of one that is lent may be
// read where it stands, once the receiver has taken it over.
struct LongPayload {
  static constexpr std::uint64_t kTakenOver = std::uint64_t{1} << 63;
  std::uint64_t symmetric;  // Segment::symmetric_offset, or 0
  std::uint64_t address;    // in the sender's memory; 0 if it is not lent
  // How much the sender puts into the ring, with kTakenOver if the receiver fetches the rest. If it is lent,
  // the sender raises it before each piece, else it is how much is in the ring already.
  std::atomic<std::uint64_t> staged_nbytes;

  bool is_lent() const { return symmetric != 0 || address != 0; }
};

// One direction between two ranks: cells for headers and small payloads, and a
// ring of bytes for the rest. See shm_channel.hpp.
struct alignas(kLinePair) Cell {
  static constexpr std::size_t kInlineNbytes = 40;
  std::atomic<std::uint64_t> flag;  // 1 + the number of the message; stored last
  std::uint64_t count;
  std::uint32_t tag;
  std::uint32_t dtype;
  union {
    unsigned char payload[kInlineNbytes];
    LongPayload long_payload;
  };
};
static_assert(sizeof(LongPayload) <= Cell::kInlineNbytes);
struct ChannelControl {
  alignas(kLinePair) std::atomic<std::uint64_t> bytes_written;  // by the sender
  alignas(kLinePair) std::atomic<std::uint64_t> bytes_read;     // by the receiver
  std::atomic<std::uint64_t> messages_read;
};

// Sizes and offsets, the same on every rank: a function of the number of ranks and of the size of a
// heap, which whoever makes the segment chooses.
struct SegmentLayout {
  SegmentLayout(int num_ranks, std::size_t nbytes_of_heap);

  static constexpr int kSmallSlots = 32;  // small payloads of the largest size that fit in the ring
  static constexpr int kRoundSlots = 8;   // two-shot rounds in flight: ranks may be two apart
  static constexpr int kCells = 32;

  int size;
  std::size_t small_nbytes;       // largest payload that one header publishes
  std::size_t small_ring_nbytes;  // the ring in which one rank stages them
  std::size_t window_nbytes;      // staging of one rank
  std::size_t results_nbytes;     // what one rank reduced for the others: its share of every round
  std::size_t channel_nbytes;     // ring of bytes of one ordered pair
  std::size_t sleepers_offset, headers_offset, controls_offset, small_rings_offset, windows_offset,
      results_offset, channels_offset;
  std::size_t heaps_offset;  // what is before is backed by memory before the first call
  std::size_t heap_nbytes;   // symmetric heap of one rank; address space, backed on demand
  std::size_t total_nbytes() const { return heaps_offset + heap_nbytes * size; }
  std::size_t channel_stride() const;
};

// A mapping of the segment. Threads of one process share one; processes each map
// the same memfd.
class Segment {
 public:
  // A new anonymous file for `size` ranks, sealed against shrinking and growing. What all ranks write is
  // backed by memory.
  static int create_file(int size);
  // Maps such a file, and backs what the rank at `place` alone writes: at the same time as the others do it,
  // and near to its own core. Keeps no descriptor. Throws Error{io} if it is not for `size` ranks.
  static std::shared_ptr<Segment> map_file(int fd, int size, int place);
  // For ranks that are threads of this process.
  static std::shared_ptr<Segment> create(int size);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentLayout& layout() const { return layout_; }
  int size() const { return layout_.size; }

  std::atomic<std::uint64_t>& abort_word() { return at<GroupControl>(0)->abort; }
  std::atomic<std::uint32_t>& succession_word() { return at<GroupControl>(0)->succession; }
  // Ends the group for the first reason that anybody gives, and wakes every sleeper.
  void abort(AbortReason reason) noexcept;
  // The words on which a rank sleeps in its collectives and in its messages: see parking.hpp.
  std::atomic<std::uint32_t>& collective_sleeper(int place) {
    return at<std::atomic<std::uint32_t>>(layout_.sleepers_offset)[place];
  }
  std::atomic<std::uint32_t>& message_sleeper(int place) {
    return at<std::atomic<std::uint32_t>>(layout_.sleepers_offset)[layout_.size + place];
  }
  HeaderSlot& header(int place, unsigned parity) {
    return at<HeaderSlot>(layout_.headers_offset)[parity * layout_.size + place];
  }
  RankControl& control(int place) { return at<RankControl>(layout_.controls_offset)[place]; }
  unsigned char* small_ring(int place) {
    return base_ + layout_.small_rings_offset + place * layout_.small_ring_nbytes;
  }
  unsigned char* window(int place) { return base_ + layout_.windows_offset + place * layout_.window_nbytes; }
  unsigned char* results(int place) {
    return base_ + layout_.results_offset + place * layout_.results_nbytes;
  }
  ChannelControl& channel(int src, int dst) { return *at<ChannelControl>(channel_offset(src, dst)); }
  Cell* cells(int src, int dst) { return at<Cell>(channel_offset(src, dst) + sizeof(ChannelControl)); }
  unsigned char* ring(int src, int dst) {
    return base_ + channel_offset(src, dst) + sizeof(ChannelControl) + SegmentLayout::kCells * sizeof(Cell);
  }
  unsigned char* heap(int place) { return base_ + layout_.heaps_offset + place * layout_.heap_nbytes; }

  // Where in the symmetric heaps [data, data + nbytes) lies, plus one; 0 if outside.
  std::uint64_t symmetric_offset(const void* data, std::size_t nbytes) const {
    const auto distance =
        static_cast<std::uint64_t>(static_cast<const unsigned char*>(data) - (base_ + layout_.heaps_offset));
    const std::uint64_t heaps = layout_.heap_nbytes * layout_.size;
    return distance < heaps && nbytes <= heaps - distance ? distance + 1 : 0;
  }
  unsigned char* symmetric_pointer(std::uint64_t offset_plus_one) {
    return base_ + layout_.heaps_offset + (offset_plus_one - 1);
  }

 private:
  Segment(unsigned char* base, SegmentLayout layout) : base_(base), layout_(layout) {}
  static std::shared_ptr<Segment> map(int fd, int size);
  void back_place(int fd, int place);

  template <class T>
  T* at(std::size_t offset) {
    return reinterpret_cast<T*>(base_ + offset);
  }
  // A rank has no channel to itself.
  std::size_t channel_offset(int src, int dst) const {
    const int index = src * (layout_.size - 1) + (dst < src ? dst : dst - 1);
    return layout_.channels_offset + static_cast<std::size_t>(index) * layout_.channel_stride();
  }

  unsigned char* base_;
  SegmentLayout layout_;
};

}  // namespace ferro

#endif  // FERRO_SEGMENT_HPP
