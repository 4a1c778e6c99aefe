#include "ferro/channel.hpp"

#include <poll.h>

#include <chrono>
#include <new>

#include "ferro/clock.hpp"
#include "ferro/fingerprint.hpp"

namespace ferro {
namespace {

std::string describe(DType dtype, std::uint64_t count, std::uint32_t tag) {
  std::string text = std::to_string(count) + " x " + name_of(dtype);
  if (tag != 0) text += " with tag " + std::to_string(tag);
  return text;
}

void try_discard_rest(const std::vector<std::unique_ptr<Channel>>& channels) {
  constexpr int kQuietMs = 20;  // the peers' kernels have sent what they had: a few round trips
  constexpr std::chrono::milliseconds kLongest{200};
  std::vector<Channel*> noisy;
  for (const std::unique_ptr<Channel>& channel : channels)
    if (channel != nullptr && channel->discard_unread()) noisy.push_back(channel.get());
  const Clock::time_point deadline = Clock::now() + kLongest;
  while (!noisy.empty() && Clock::now() < deadline) {
    std::vector<pollfd> entries;
    for (const Channel* channel : noisy) entries.push_back({channel->poll_fd(), POLLIN, 0});
    if (poll(entries.data(), entries.size(), kQuietMs) == 0) return;
    std::vector<Channel*> rest;
    for (std::size_t i = 0; i < noisy.size(); ++i)
      if (entries[i].revents == 0 || noisy[i]->discard_unread()) rest.push_back(noisy[i]);
    noisy.swap(rest);
  }
}

}  // namespace

void Message::check_fits(DType dtype, std::uint64_t count, std::uint32_t tag, int src) {
  if (dtype == op.dtype && count == op.count && tag == op.tag) return;
  is_discarding = true;
  mismatch = "rank " + std::to_string(src) + " sent " + describe(dtype, count, tag) + ", but " +
             describe(op.dtype, op.count, op.tag) + " was to be received";
}

void discard_rest(const std::vector<std::unique_ptr<Channel>>& channels) noexcept {
  try {
    try_discard_rest(channels);
  } catch (const std::bad_alloc&) {
    // Then peers may miss what they have not received yet.
  }
}

}  // namespace ferro
