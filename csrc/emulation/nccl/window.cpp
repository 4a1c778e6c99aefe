#include "emulation/nccl/window.hpp"

#include <cstring>

#include "emulation/blocked_signals.hpp"
#include "emulation/complaint.hpp"
#include "emulation/environment.hpp"
#include "emulation/nccl/cudart_functions.hpp"

namespace emulation {

bool has_windows() { return nccl_setting("NCCL_WIN_ENABLE", 1) != 0; }

WindowService::WindowService(Segment& segment) : segment_(segment) {
  const BlockedSignals blocked;
  thread_ = std::thread([this] { work(); });
}

WindowService::~WindowService() {
  stop_.store(true, std::memory_order_relaxed);
  segment_.ring();
  thread_.join();
}

void WindowService::add(std::uint32_t number, char* base) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bases_[number] = base;
}

void WindowService::remove(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bases_.erase(number);
}

void WindowService::work() {
  try {
    cudart().set_activity("a put of another rank");
    while (true) {
      segment_.await([this] { return is_any_full(); }, stop_);
      for (int src = 0; src < segment_.num_ranks; ++src) take(src);
    }
  } catch (const Interrupted&) {
  } catch (const Failure&) {  // a dead rank: whoever waits for it reports it
  }
}

bool WindowService::is_any_full() {
  for (int src = 0; src < segment_.num_ranks; ++src) {
    if (segment_.put(src, segment_.rank).state.load(std::memory_order_acquire) == Channel::kFull) return true;
  }
  return false;
}

void WindowService::take(int src) {
  Channel& channel = segment_.put(src, segment_.rank);
  if (channel.state.load(std::memory_order_acquire) != Channel::kFull) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto window = bases_.find(channel.window);
    if (window == bases_.end()) {
      die("rank ", src, " put into a window that rank ", segment_.rank, " has deregistered");
    }
    std::memcpy(window->second + channel.offset, channel.data, channel.nbytes);
  }
  if (channel.is_last != 0) {
    // Release: whoever sees the signal sees the data.
    segment_
        .signals(segment_.rank, src, static_cast<int>(channel.signal_index),
                 static_cast<int>(channel.signal_context))
        .fetch_add(1, std::memory_order_release);
  }
  channel.state.store(Channel::kEmpty, std::memory_order_release);
  segment_.ring();
}

}  // namespace emulation
