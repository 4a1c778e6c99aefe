// CUDA graphs: what a capture recorded, run again.
#include <algorithm>

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

// By node: the branch that it goes on, or begins.
std::vector<std::size_t> branches_of(const Graph& graph) {
  std::vector<std::size_t> branches;
  std::vector<std::size_t> ends;  // by branch: its latest node
  for (std::size_t number = 0; number < graph.nodes.size(); ++number) {
    const std::vector<std::size_t>& after = graph.nodes[number].after;
    const auto last = std::find_if(after.begin(), after.end(),
                                   [&](std::size_t each) { return ends[branches[each]] == each; });
    if (last == after.end()) ends.emplace_back();
    branches.push_back(last == after.end() ? ends.size() - 1 : branches[*last]);
    ends[branches.back()] = number;
  }
  return branches;
}

// Keeps the graph alive: it may be destroyed while it runs.
Operation operation_of(const GraphPtr& graph, const GraphNode& node) {
  return {node.name, [graph, &node] {
            if (node.run) node.run();
          }};
}

// The first branch runs in the stream, each other one in a thread of its own: what the graph does not put in
// order happens at the same time, as on a GPU.
void launch(const GraphPtr& graph, const StreamPtr& stream) {
  Operation begin{"cudaGraphLaunch", {}, {}, false};
  if (graph->last_launch) begin.after.push_back(graph->last_launch);
  const MilestonePtr begun = enqueue(stream, std::move(begin));
  const std::vector<std::size_t> branches = branches_of(*graph);
  std::vector<StreamPtr> streams = {stream};
  std::vector<MilestonePtr> done;
  for (std::size_t number = 0; number < branches.size(); ++number) {
    Operation operation = operation_of(graph, graph->nodes[number]);
    for (const std::size_t earlier : graph->nodes[number].after) operation.after.push_back(done[earlier]);
    if (branches[number] == streams.size()) {
      operation.after.push_back(begun);
      streams.push_back(Stream::start(stream->handle, stream->device, stream->flags));
    }
    done.push_back(streams[branches[number]]->submit(std::move(operation)));
  }
  for (std::size_t branch = 1; branch < streams.size(); ++branch) streams[branch]->close();
  graph->last_launch = enqueue(stream, {"cudaGraphLaunch", {}, std::move(done), false});
}

// A graph within a graph.
void launch_captured(const GraphPtr& graph, const StreamPtr& stream) {
  for (const GraphNode& node : graph->nodes) enqueue(stream, operation_of(graph, node));
}

}  // namespace

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

EMULATION_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const GraphPtr graph = runtime().executables.get(executable);
    const StreamPtr where = find_stream(stream);
    where->capture ? launch_captured(graph, where) : launch(graph, where);
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

EMULATION_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                                    unsigned flags) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const GraphPtr keeper = runtime().graphs.get(graph);
    const bool is_moved = (flags & kGraphUserObjectMove) != 0;
    keeper->objects.push_back(is_moved ? runtime().objects.take(object) : runtime().objects.get(object));
  });
}
