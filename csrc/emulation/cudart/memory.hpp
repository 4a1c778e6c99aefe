// Emulated device memory and pinned host memory: where it lies, and whose it is.
//
// Every allocation is a mapping of its own between two guard pages, its end as close
// to the second one as CUDA's alignment of 256 allows. Freed memory is made inaccessible,
// and its addresses are not used again for a long time: whoever still reads or
// writes it faults, and the report says what the memory was.
#ifndef EMULATION_CUDART_MEMORY_HPP
#define EMULATION_CUDART_MEMORY_HPP

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace emulation {

enum class MemoryKind { device, pinned };

struct Allocation {
  std::uintptr_t base = 0;
  std::size_t nbytes = 0;
  MemoryKind kind = MemoryKind::device;
  int device = 0;
  bool is_freed = false;
  std::uintptr_t mapping = 0;  // guard pages included
  std::size_t mapping_nbytes = 0;

  std::uintptr_t end() const { return base + nbytes; }
};

class Memory {
 public:
  Memory(int num_devices, std::size_t capacity_nbytes);

  // Null when the device, or this machine, has no room.
  void* allocate(MemoryKind kind, int device, std::size_t nbytes);

  // Two steps, for cudaFreeAsync: from the first on the address must not be given to
  // any call, from the second on it faults. False if `data` is not such an allocation.
  bool retire(void* data, bool is_device);
  void make_inaccessible(void* data);

  // The allocation in which the address lies, freed ones and guard pages included.
  bool find(const void* address, Allocation* found);
  std::size_t free_nbytes(int device);
  std::size_t capacity_nbytes() const { return capacity_nbytes_; }

  // For a signal handler. Also false if another thread holds the lock for long.
  bool find_from_handler(const void* address, Allocation* found);

 private:
  bool find_locked(const void* address, Allocation* found) const;
  void evict_locked();

  const std::size_t capacity_nbytes_;
  std::mutex mutex_;                                  // guards all below
  std::map<std::uintptr_t, Allocation> allocations_;  // by the start of the mapping
  std::map<std::uintptr_t, std::uintptr_t> starts_;   // base -> key of allocations_
  std::deque<std::uintptr_t> quarantine_;             // keys, the longest freed first
  std::vector<std::size_t> used_nbytes_;              // by device
};

}  // namespace emulation

#endif  // EMULATION_CUDART_MEMORY_HPP
