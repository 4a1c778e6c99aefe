#include "emulation/cudart/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include "emulation/complaint.hpp"

namespace emulation {
namespace {

constexpr std::size_t kAlignment = 256;  // what cudaMalloc promises

// To the kernel each is two or three mappings, of which it allows a process 65,530.
constexpr std::size_t kMaxQuarantined = 4096;

std::size_t page_nbytes() {
  static const std::size_t nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return nbytes;
}

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Memory::Memory(int num_devices, std::size_t capacity_nbytes)
    : capacity_nbytes_(capacity_nbytes), used_nbytes_(static_cast<std::size_t>(num_devices), 0) {}

void* Memory::allocate(MemoryKind kind, int device, std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t& used = used_nbytes_[static_cast<std::size_t>(device)];
  const bool counts = kind == MemoryKind::device;
  if (nbytes > capacity_nbytes_ || (counts && nbytes > capacity_nbytes_ - used)) return nullptr;

  const std::size_t body = round_up(nbytes, page_nbytes());
  const std::size_t total = body + 2 * page_nbytes();
  void* mapped = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(mapped) + page_nbytes();
  if (mprotect(first, body, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapped, total);
    return nullptr;
  }
  Allocation made;
  made.base = reinterpret_cast<std::uintptr_t>(first) + body - round_up(nbytes, kAlignment);
  made.nbytes = nbytes;
  made.kind = kind;
  made.device = device;
  made.mapping = reinterpret_cast<std::uintptr_t>(mapped);
  made.mapping_nbytes = total;
  allocations_[made.mapping] = made;
  starts_[made.base] = made.mapping;
  if (counts) used += nbytes;
  return reinterpret_cast<void*>(made.base);
}

bool Memory::retire(void* data, bool is_device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto start = starts_.find(reinterpret_cast<std::uintptr_t>(data));
  if (start == starts_.end()) return false;
  Allocation& allocation = allocations_.at(start->second);
  const bool is_pinned = allocation.kind == MemoryKind::pinned;
  if (allocation.is_freed || is_pinned == is_device) return false;
  allocation.is_freed = true;
  if (!is_pinned) used_nbytes_[static_cast<std::size_t>(allocation.device)] -= allocation.nbytes;
  return true;
}

void Memory::make_inaccessible(void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto start = starts_.find(reinterpret_cast<std::uintptr_t>(data));
  if (start == starts_.end()) return;
  const Allocation& allocation = allocations_.at(start->second);
  void* mapping = reinterpret_cast<void*>(allocation.mapping);
  // Mapping anew gives the pages back, and leaves one inaccessible range where there were three.
  if (mmap(mapping, allocation.mapping_nbytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    die("cannot make freed memory inaccessible: mmap failed");
  }
  quarantine_.push_back(allocation.mapping);
  evict_locked();
}

void Memory::evict_locked() {
  while (quarantine_.size() > kMaxQuarantined) {
    const auto oldest = allocations_.find(quarantine_.front());
    quarantine_.pop_front();
    munmap(reinterpret_cast<void*>(oldest->second.mapping), oldest->second.mapping_nbytes);
    starts_.erase(oldest->second.base);
    allocations_.erase(oldest);
  }
}

bool Memory::find(const void* address, Allocation* found) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return find_locked(address, found);
}

bool Memory::find_locked(const void* address, Allocation* found) const {
  const auto where = reinterpret_cast<std::uintptr_t>(address);
  auto next = allocations_.upper_bound(where);
  if (next == allocations_.begin()) return false;
  const Allocation& candidate = std::prev(next)->second;
  if (where >= candidate.mapping + candidate.mapping_nbytes) return false;
  *found = candidate;
  return true;
}

std::size_t Memory::free_nbytes(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capacity_nbytes_ - used_nbytes_[static_cast<std::size_t>(device)];
}

bool Memory::find_from_handler(const void* address, Allocation* found) {
  // The thread that faulted does not hold the lock: it was moving a user's bytes. Another
  // thread may, for microseconds.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (mutex_.try_lock()) {
      const bool is_found = find_locked(address, found);
      mutex_.unlock();
      return is_found;
    }
    usleep(100);
  }
  return false;
}

}  // namespace emulation
