#include "nccl/grouped_operation.hpp"

#include <algorithm>
#include <cstdint>

#include "nccl/device_guard.hpp"
#include "nccl/event.hpp"
#include "nccl/library.hpp"
#include "nccl/turn.hpp"

namespace ferro::nccl {
namespace {

// NCCL refuses a group of which a part would go into a CUDA graph, and that ends communicators that do not
// block. CUDA is asked only where there are several streams.
void check_captured_alike(const std::vector<GroupedOperation>& operations) {
  const cudaStream_t first = operations.front().operation.stream;
  if (std::all_of(operations.begin(), operations.end(),
                  [=](const GroupedOperation& each) { return each.operation.stream == first; }))
    return;
  bool is_any_captured = false;
  bool is_any_not = false;
  for (const auto& [communicator, operation] : operations) {
    const DeviceGuard guard(communicator->cuda(), communicator->device());  // for default streams
    const Capture capture = capture_of(communicator->cuda(), operation.stream);
    (capture == Capture::active ? is_any_captured : is_any_not) = true;
  }
  if (is_any_captured && is_any_not)
    throw misused("ncclGroupEnd", "some streams are captured into a CUDA graph, and others are not");
}

}  // namespace

bool are_apart(const std::vector<GroupedOperation>& allreduces) {
  struct Extent {
    std::uintptr_t begin;
    std::uintptr_t end;
    bool is_written;
  };
  std::vector<Extent> extents;
  extents.reserve(2 * allreduces.size());
  const auto add = [&](const void* data, std::size_t nbytes, bool is_written) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    if (nbytes != 0) extents.push_back({begin, begin + nbytes, is_written});
  };
  for (const GroupedOperation& each : allreduces) {
    const Operation& o = each.operation;
    const std::size_t nbytes = o.count * item_size(o.dtype);
    add(o.out, nbytes, true);
    if (o.in != o.out) add(o.in, nbytes, false);
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  std::uintptr_t end_of_any = 0;
  std::uintptr_t end_of_written = 0;
  for (const Extent& each : extents) {
    if (each.begin < (each.is_written ? end_of_any : end_of_written)) return false;
    end_of_any = std::max(end_of_any, each.end);
    if (each.is_written) end_of_written = std::max(end_of_written, each.end);
  }
  return true;
}

void launch_group(const std::vector<GroupedOperation>& operations, Patience& patience) {
  std::vector<Communicator*> members;
  for (const GroupedOperation& each : operations) {
    check_available(each.operation.op);
    if (std::find(members.begin(), members.end(), each.communicator) == members.end())
      members.push_back(each.communicator);
  }
  if (members.empty()) return;
  Turn turn(members, "ncclGroupEnd", patience);
  for (const Communicator* each : members) each->check_in_service("ncclGroupEnd");
  check_captured_alike(operations);
  CallGroup group;
  for (auto each = operations.begin(); each != operations.end() && group.is_well(); ++each)
    group.note(each->communicator->issue_now(each->operation));
  turn.settle(group.end());
}

}  // namespace ferro::nccl
