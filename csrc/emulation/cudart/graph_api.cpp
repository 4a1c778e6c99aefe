// CUDA graphs: what a capture recorded, run again.
#include "emulation/cudart/runtime.hpp"

using namespace emulation;

namespace {

// The last reference to a graph takes its user objects with it, whose destructors are the
// program's: they run after the lock is let go.
template <class Table, class Handle>
void destroy(Table& table, Handle handle) {
  GraphPtr dying;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  dying = table.take(handle);
}

void launch(const GraphPtr& graph, const StreamPtr& stream) {
  // Each operation keeps the graph alive: it may be destroyed while it runs.
  for (const GraphNode& node : graph->nodes) {
    enqueue(stream, {node.name, [graph, &node] {
                       if (node.run) node.run();
                     }});
  }
}

}  // namespace

EMULATION_API cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  return guarded([&] {
    require(graph != nullptr);
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    *graph = runtime().graphs.add(std::make_shared<Graph>());
  });
}

EMULATION_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return guarded([&] { destroy(runtime().graphs, graph); });
}

EMULATION_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return guarded([&] { destroy(runtime().executables, executable); });
}

EMULATION_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                               unsigned long long) {
  return guarded([&] {
    require(executable != nullptr);
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    *executable = runtime().executables.add(std::make_shared<Graph>(*runtime().graphs.get(graph)));
  });
}

EMULATION_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                        unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

EMULATION_API cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    runtime().executables.get(executable);
  });
}

EMULATION_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    launch(runtime().executables.get(executable), find_stream(stream));
  });
}

// Nodes have no handles: only their number can be asked for.
EMULATION_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  return guarded([&] {
    require(count != nullptr);
    require(nodes == nullptr, cudaErrorNotSupported);
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    *count = runtime().graphs.get(graph)->nodes.size();
  });
}

EMULATION_API cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data,
                                               cudaHostFn_t destroy_data, unsigned references, unsigned) {
  return guarded([&] {
    // The creator has no use for more than one reference here.
    require(object != nullptr && destroy_data != nullptr && references == 1);
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    *object = runtime().objects.add(std::make_shared<UserObject>(data, destroy_data));
  });
}

EMULATION_API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  return guarded([&] {
    std::shared_ptr<UserObject> dying;
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    dying = runtime().objects.take(object);
  });
}

EMULATION_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                                    unsigned flags) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const GraphPtr keeper = runtime().graphs.get(graph);
    const bool is_moved = (flags & kGraphUserObjectMove) != 0;
    keeper->objects.push_back(is_moved ? runtime().objects.take(object) : runtime().objects.get(object));
  });
}
