// CUDA graphs, as far as stream capture makes them: operations and their order.
#ifndef EMULATION_CUDART_GRAPH_HPP
#define EMULATION_CUDART_GRAPH_HPP

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "emulation/cudart/stream.hpp"

namespace emulation {

// What a graph keeps alive for a library: destroyed with its last reference.
struct UserObject {
  UserObject(void* data, cudaHostFn_t destroy) : data(data), destroy(destroy) {}
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;
  ~UserObject() { destroy(data); }

  void* const data;
  const cudaHostFn_t destroy;
};

struct GraphNode {
  const char* name;
  std::function<void()> run;
  std::vector<std::size_t> after;  // earlier nodes only, so that the order of entry is a valid one
};

// Guarded by the runtime's lock while it is captured; its nodes are unchanged afterwards.
struct Graph {
  std::vector<GraphNode> nodes;
  std::vector<std::shared_ptr<UserObject>> objects;
  MilestonePtr last_launch;  // of an executable one; under the lock
};
using GraphPtr = std::shared_ptr<Graph>;

// One cudaStreamBeginCapture .. cudaStreamEndCapture. Guarded by the runtime's lock.
struct Capture {
  cudaGraph_t handle = nullptr;
  GraphPtr graph = std::make_shared<Graph>();
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  StreamPtr origin;
  bool is_invalid = false;
};
using CapturePtr = std::shared_ptr<Capture>;

}  // namespace emulation

#endif  // EMULATION_CUDART_GRAPH_HPP
