// Reads the private arrays of other ranks of this machine.
//
// One copy instead of two, by process_vm_readv, where the kernel permits it. Each rank finds
// that out by reading a number that every other rank keeps in its own memory, which also tells a
// peer from a stranger that has its process id in another namespace. Ranks that are threads of
// one process read each other in the same way, so that an array that was freed is an error, not a
// crash. Peers' memory is never written: a rank that has left a call may have put other things
// where its array was. That spoils what is read, and is noticed; a write would destroy them.
#ifndef FERRO_PEER_MEMORY_HPP
#define FERRO_PEER_MEMORY_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ferro/copy_choice.hpp"
#include "ferro/segment.hpp"

namespace ferro {

class PeerMemory {
 public:
  // Publishes where this rank's number is. `place` and peers are places in the segment.
  PeerMemory(std::shared_ptr<Segment> segment, int place, PeerReads setting = PeerReads::automatic);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // What the program asks for.
  PeerReads setting() const { return setting_; }
  // Whether this process may read the memory of `peer`. Tried when the peer has published its
  // number, and true until read() is refused.
  bool can_read(int peer);
  // Whether can_read() has been true of every peer, and is still.
  bool can_read_all() const;
  // Whether peers that can read this process can read [data, data + nbytes) as well. They cannot
  // where a driver mapped it, nor once this process has changed its privileges.
  bool can_lend(const void* data, std::size_t nbytes) const;
  // Reads from `src` in the memory of `peer`, of which can_read() was true. Returns 0 or the error
  // number; any but EFAULT, which is the array's, counts for all of the peer's memory.
  [[nodiscard]] int read(int peer, void* dst, const void* src, std::size_t nbytes) noexcept;

 private:
  enum class Access : unsigned char { unknown, refused, granted };
  struct Peer {
    std::atomic<Access> access{Access::unknown};
    std::atomic<int> pid{0};
  };

  std::shared_ptr<Segment> segment_;
  const int place_;
  const PeerReads setting_;
  const int own_pid_;
  std::uint64_t own_number_;
  std::vector<Peer> peers_;
};

}  // namespace ferro

#endif  // FERRO_PEER_MEMORY_HPP
