// Streams, events and stream capture.
#include <algorithm>

#include "emulation/cudart/runtime.hpp"

using namespace emulation;

namespace {

void create_stream(cudaStream_t* out, unsigned flags) {
  require(out != nullptr && (flags & ~cudaStreamNonBlocking) == 0);
  require(runtime().num_devices > 0, cudaErrorNoDevice);
  make_context();
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const cudaStream_t handle = runtime().streams.next_handle();
  const StreamPtr stream = Stream::start(handle, current_device(), flags);
  runtime().streams.put(handle, stream);
  runtime().running.push_back(stream);
  *out = handle;
}

void require_not_captured(const StreamPtr& stream) {
  if (!stream->capture) return;
  stream->capture->is_invalid = true;
  throw Failure{cudaErrorStreamCaptureUnsupported};
}

bool is_in_progress(const CapturePtr& capture) {
  const auto& captures = runtime().captures;
  return std::find(captures.begin(), captures.end(), capture) != captures.end();
}

void record(const EventPtr& event, const StreamPtr& stream) {
  require(event->device == stream->device, cudaErrorInvalidResourceHandle);
  event->capture = stream->capture;
  if (stream->capture) {
    require(!stream->capture->is_invalid, cudaErrorStreamCaptureInvalidated);
    event->tail = stream->tail;
    return;
  }
  event->tail.clear();
  event->milestone = enqueue(stream, {"cudaEventRecord", {}, {}, false});
}

// The stream's work becomes part of the capture in which the event was recorded.
void join_capture(const StreamPtr& stream, const EventPtr& event) {
  require(is_in_progress(event->capture), cudaErrorCapturedEvent);
  require(!is_legacy(stream->handle), cudaErrorStreamCaptureImplicit);
  if (stream->capture && stream->capture != event->capture) {
    stream->capture->is_invalid = event->capture->is_invalid = true;
    throw Failure{cudaErrorStreamCaptureMerge};
  }
  if (!stream->capture) stream->tail.clear();
  stream->capture = event->capture;
  for (const std::size_t node : event->tail) {
    if (std::find(stream->tail.begin(), stream->tail.end(), node) == stream->tail.end()) {
      stream->tail.push_back(node);
    }
  }
}

void wait_event(const StreamPtr& stream, const EventPtr& event) {
  if (event->capture) return join_capture(stream, event);
  if (!event->milestone) return;  // never recorded
  if (stream->capture) {
    stream->capture->is_invalid = true;
    throw Failure{cudaErrorStreamCaptureIsolation};
  }
  enqueue(stream, {"cudaStreamWaitEvent", {}, {event->milestone}, false});
}

// Whether all nodes lie before the end of the stream in which the capture began.
bool is_joined(const Graph& graph, const std::vector<std::size_t>& tail) {
  std::vector<bool> is_before(graph.nodes.size(), false);
  for (const std::size_t node : tail) is_before[node] = true;
  for (std::size_t node = graph.nodes.size(); node-- > 0;) {
    if (!is_before[node]) return false;
    for (const std::size_t earlier : graph.nodes[node].after) is_before[earlier] = true;
  }
  return true;
}

void forget_capture(const CapturePtr& capture) {
  auto& captures = runtime().captures;
  captures.erase(std::remove(captures.begin(), captures.end(), capture), captures.end());
  for (int device = 0; device < runtime().num_devices; ++device) {
    for (const StreamPtr& stream : live_streams(device)) {
      if (stream->capture == capture) stream->capture = nullptr;
    }
  }
}

cudaGraph_t end_capture(const StreamPtr& stream) {
  const CapturePtr capture = stream->capture;
  require(capture != nullptr);
  require(capture->origin == stream, cudaErrorStreamCaptureUnmatched);
  const bool is_same_thread = capture->thread == std::this_thread::get_id();
  require(is_same_thread || capture->mode == cudaStreamCaptureModeRelaxed, cudaErrorStreamCaptureWrongThread);
  const bool is_whole = is_joined(*capture->graph, stream->tail);
  forget_capture(capture);
  capture->origin = nullptr;  // it and the stream referred to each other
  if (capture->is_invalid || !is_whole) {
    runtime().graphs.take(capture->handle);
    throw Failure{is_whole ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined};
  }
  // Events that were recorded in the capture keep it alive. They would otherwise destroy the graph
  // when they are destroyed or recorded anew, with the lock held, and its user objects' destructors
  // may call us.
  capture->graph = nullptr;
  return capture->handle;
}

// While a stream is captured that it would wait for, the legacy default stream cannot be used: returns that
// capture, null if nothing is in the way.
CapturePtr capture_in_the_way(const StreamPtr& stream) {
  if (!is_legacy(stream->handle)) return nullptr;
  const std::vector<StreamPtr> streams = live_streams(stream->device);
  const auto found = std::find_if(streams.begin(), streams.end(), [](const StreamPtr& other) {
    return other->capture != nullptr && other->synchronizes_with_legacy();
  });
  return found == streams.end() ? nullptr : (*found)->capture;
}

cudaStreamCaptureStatus status_of(const StreamPtr& stream) {
  if (!stream->capture) return cudaStreamCaptureStatusNone;
  return stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t capture_info(cudaStream_t handle, cudaStreamCaptureStatus* status, cudaGraph_t* graph) {
  return guarded([&] {
    require(status != nullptr);
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const StreamPtr stream = find_stream(handle);
    require(capture_in_the_way(stream) == nullptr, cudaErrorStreamCaptureImplicit);  // to ask ends no capture
    *status = status_of(stream);
    const bool is_active = *status == cudaStreamCaptureStatusActive;
    if (is_active && graph != nullptr) *graph = stream->capture->handle;
  });
}

MilestonePtr milestone_of(cudaEvent_t handle) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const EventPtr event = runtime().events.get(handle);
  if (event->capture && is_in_progress(event->capture)) {
    event->capture->is_invalid = true;
    throw Failure{cudaErrorCapturedEvent};
  }
  require(event->capture == nullptr, cudaErrorCapturedEvent);
  refuse_during_capture();
  return event->milestone;
}

MilestonePtr latest_of(cudaStream_t handle) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const StreamPtr stream = find_stream(handle);
  require_not_captured(stream);
  if (const CapturePtr capture = capture_in_the_way(stream); capture != nullptr) {
    capture->is_invalid = true;
    throw Failure{cudaErrorStreamCaptureImplicit};
  }
  refuse_during_capture();
  return stream->latest();
}

}  // namespace

EMULATION_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return guarded([&] { create_stream(stream, 0); });
}

EMULATION_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return guarded([&] { create_stream(stream, flags); });
}

EMULATION_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return guarded([&] { create_stream(stream, flags); });
}

EMULATION_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return guarded([&] {
    make_context();
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const StreamPtr stream = runtime().streams.get(handle);
    require_not_captured(stream);
    runtime().streams.take(handle)->close();
  });
}

EMULATION_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return guarded([&] {
    const MilestonePtr milestone = latest_of(handle);
    if (milestone) milestone->wait();
  });
}

EMULATION_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return guarded([&] {
    const MilestonePtr milestone = latest_of(handle);
    require(!milestone || milestone->is_reached(), cudaErrorNotReady);
  });
}

EMULATION_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    wait_event(find_stream(stream), runtime().events.get(event));
  });
}

EMULATION_API cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    require(device != nullptr);
    *device = find_stream(handle)->device;
  });
}

EMULATION_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return guarded([&] {
    require(function != nullptr);
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    enqueue(find_stream(stream), {"a host function", [=] { function(data); }});
  });
}

EMULATION_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return guarded([&] {
    require(event != nullptr);
    require(runtime().num_devices > 0, cudaErrorNoDevice);
    make_context();
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    auto made = std::make_shared<Event>();
    made->flags = flags;
    made->device = current_device();
    *event = runtime().events.add(made);
  });
}

EMULATION_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EMULATION_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return guarded([&] {
    make_context();
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    runtime().events.take(event);
  });
}

EMULATION_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    record(runtime().events.get(event), find_stream(stream));
  });
}

EMULATION_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  return guarded([&] {
    make_context();
    const MilestonePtr milestone = milestone_of(event);
    require(!milestone || milestone->is_reached(), cudaErrorNotReady);
  });
}

EMULATION_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return guarded([&] {
    make_context();
    const MilestonePtr milestone = milestone_of(event);
    if (milestone) milestone->wait();
  });
}

EMULATION_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const EventPtr first = runtime().events.get(start);
    const EventPtr last = runtime().events.get(end);
    require(ms != nullptr);
    require(((first->flags | last->flags) & cudaEventDisableTiming) == 0, cudaErrorInvalidResourceHandle);
    require(first->milestone && last->milestone, cudaErrorInvalidResourceHandle);
    require(first->milestone->is_reached() && last->milestone->is_reached(), cudaErrorNotReady);
    *ms =
        std::chrono::duration<float, std::milli>(last->milestone->time() - first->milestone->time()).count();
  });
}

EMULATION_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    require(!is_legacy(handle), cudaErrorStreamCaptureUnsupported);
    const StreamPtr stream = find_stream(handle);
    require_not_captured(stream);
    auto capture = std::make_shared<Capture>();
    capture->handle = runtime().graphs.add(capture->graph);
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    stream->capture = capture;
    stream->tail.clear();
    runtime().captures.push_back(capture);
  });
}

EMULATION_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return guarded([&] {
    require(graph != nullptr);
    *graph = nullptr;
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    *graph = end_capture(find_stream(stream));
  });
}

EMULATION_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr);
}

EMULATION_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return guarded([&] {
    require(mode != nullptr);
    make_context();
    std::swap(*mode, capture_mode_of_thread());
  });
}

// For the emulated NCCL: the graph that the stream is captured into, null if it is not
// captured. cudaStreamGetCaptureInfo takes other arguments in CUDA 12 than in 13.
EMULATION_API cudaError_t ferroEmulationGraphOf(cudaStream_t stream, cudaGraph_t* graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  *graph = nullptr;
  const cudaError_t error = capture_info(stream, &status, graph);
  if (error != cudaSuccess) return error;
  return remember(status == cudaStreamCaptureStatusInvalidated ? cudaErrorStreamCaptureInvalidated
                                                               : cudaSuccess);
}
