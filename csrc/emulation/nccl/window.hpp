// Memory that other ranks may write into: ncclPutSignal.
//
// A real put needs no thread at its target. Here the target has one for each communicator
// with windows, which takes what comes in and writes it, so that memory freed under a
// window faults in the process that freed it.
#ifndef EMULATION_NCCL_WINDOW_HPP
#define EMULATION_NCCL_WINDOW_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "emulation/nccl/segment.hpp"

namespace emulation {

// Whether NCCL makes windows. A real one does not either where GPUs do not reach each other's memory; there
// it says success, too.
bool has_windows();

// Of registered memory and of windows: each operation holds one until it is done.
using UseToken = std::shared_ptr<const void>;

struct Window {
  UseToken token = std::make_shared<int>();
  std::uint32_t number = 0;  // the same on all ranks
  char* base = nullptr;
  bool is_symmetric = false;
  std::vector<std::uint64_t> nbytes;  // by rank; none before it is made

  bool contains(const void* data, int rank) const {
    const auto* at = static_cast<const char*>(data);
    return !nbytes.empty() && at >= base && at < base + nbytes[static_cast<std::size_t>(rank)];
  }
};

class WindowService {
 public:
  explicit WindowService(Segment& segment);
  ~WindowService();
  WindowService(const WindowService&) = delete;
  WindowService& operator=(const WindowService&) = delete;

  void add(std::uint32_t number, char* base);
  void remove(std::uint32_t number);

 private:
  void work();
  bool is_any_full();
  void take(int src);

  Segment& segment_;
  std::mutex mutex_;
  std::map<std::uint32_t, char*> bases_;  // under mutex_
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace emulation

#endif  // EMULATION_NCCL_WINDOW_HPP
