#include "emulation/cudart/runtime.hpp"

#include <unistd.h>

#include <algorithm>

namespace emulation {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

thread_local cudaError_t last_error = cudaSuccess;

// This thread's default streams, one per device; their work is finished when the thread ends.
struct PerThreadStreams {
  std::map<int, StreamPtr> by_device;
  ~PerThreadStreams() {
    for (auto& [device, stream] : by_device) stream->close();
  }
};

StreamPtr started(cudaStream_t handle) {
  StreamPtr stream = Stream::start(handle, current_device(), 0);
  runtime().running.push_back(stream);
  return stream;
}

StreamPtr legacy_stream(int device) {
  StreamPtr& legacy = runtime().legacy[static_cast<std::size_t>(device)];
  if (!legacy) legacy = started(nullptr);
  return legacy;
}

StreamPtr per_thread_stream() {
  thread_local PerThreadStreams streams;
  StreamPtr& stream = streams.by_device[current_device()];
  if (!stream) stream = started(cudaStreamPerThread);
  return stream;
}

void add_node(const StreamPtr& stream, Operation& operation) {
  if (stream->capture->is_invalid) throw Failure{cudaErrorStreamCaptureInvalidated};
  Graph& graph = *stream->capture->graph;
  graph.nodes.push_back({operation.name, std::move(operation.run), stream->tail});
  stream->tail = {graph.nodes.size() - 1};
}

// What an operation of the legacy default stream waits for, and what waits for it.
std::vector<MilestonePtr> implicit_order(const StreamPtr& stream) {
  std::vector<MilestonePtr> after;
  if (!stream->synchronizes_with_legacy()) return after;
  const auto add = [&](const StreamPtr& other) {
    const MilestonePtr latest = other->latest();
    if (latest && !latest->is_reached()) after.push_back(latest);
  };
  if (!is_legacy(stream->handle)) {
    const StreamPtr& legacy = runtime().legacy[static_cast<std::size_t>(stream->device)];
    if (legacy) add(legacy);
    return after;
  }
  for (const StreamPtr& other : live_streams(stream->device)) {
    if (other == stream || !other->synchronizes_with_legacy()) continue;
    if (other->capture) {
      other->capture->is_invalid = true;
      throw Failure{cudaErrorStreamCaptureImplicit};
    }
    add(other);
  }
  return after;
}

}  // namespace

Runtime::Runtime()
    : num_devices(static_cast<int>(setting("DEVICES", 1, 0, 64))),
      memory(num_devices, static_cast<std::size_t>(setting("MEMORY_MB", 8192, 1, 1 << 20)) * kMiB),
      pid(getpid()),
      contexts(static_cast<std::size_t>(num_devices)),
      legacy(static_cast<std::size_t>(num_devices)) {
  install_fault_report();
}

Runtime& runtime() {
  static Runtime& instance = *new Runtime;
  return instance;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

// Relaxed: nothing else is published with it, and tests that read it have joined its threads.
void make_context() {
  thread_has_context() = true;
  const auto device = static_cast<std::size_t>(current_device());
  if (device < runtime().contexts.size()) runtime().contexts[device].store(true, std::memory_order_relaxed);
}

bool& thread_has_context() {
  thread_local bool has_context = false;
  return has_context;
}

cudaStreamCaptureMode& capture_mode_of_thread() {
  thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

StreamPtr find_stream(cudaStream_t handle) {
  require(runtime().num_devices > 0, cudaErrorNoDevice);
  make_context();
  if (is_legacy(handle)) return legacy_stream(current_device());
  if (handle == cudaStreamPerThread) return per_thread_stream();
  return runtime().streams.get(handle);
}

std::vector<StreamPtr> live_streams(int device) {
  std::vector<StreamPtr> streams;
  auto& running = runtime().running;
  running.erase(
      std::remove_if(running.begin(), running.end(), [](const auto& stream) { return stream.expired(); }),
      running.end());
  for (const auto& entry : running) {
    if (StreamPtr stream = entry.lock(); stream && stream->device == device) streams.push_back(stream);
  }
  return streams;
}

MilestonePtr enqueue(const StreamPtr& stream, Operation operation) {
  if (stream->capture) {
    add_node(stream, operation);
    return nullptr;
  }
  for (MilestonePtr& milestone : implicit_order(stream)) operation.after.push_back(std::move(milestone));
  return stream->submit(std::move(operation));
}

bool is_idle(const StreamPtr& stream) {
  const MilestonePtr latest = stream->latest();
  return (!latest || latest->is_reached()) && implicit_order(stream).empty();
}

void refuse_during_capture() {
  const cudaStreamCaptureMode allowed = capture_mode_of_thread();
  if (allowed == cudaStreamCaptureModeRelaxed) return;
  for (const CapturePtr& capture : runtime().captures) {
    const bool is_ours = capture->thread == std::this_thread::get_id();
    const bool is_everybodys =
        capture->mode == cudaStreamCaptureModeGlobal && allowed == cudaStreamCaptureModeGlobal;
    if (capture->mode == cudaStreamCaptureModeRelaxed || (!is_ours && !is_everybodys)) continue;
    capture->is_invalid = true;
    throw Failure{cudaErrorStreamCaptureUnsupported};
  }
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace emulation

using namespace emulation;

EMULATION_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EMULATION_API cudaError_t cudaPeekAtLastError() { return last_error; }
