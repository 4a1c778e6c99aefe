#include "emulation/nccl/group.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <future>
#include <optional>
#include <thread>

#include "emulation/nccl/calls.hpp"
#include "emulation/nccl/connections.hpp"
#include "emulation/nccl/cudart_functions.hpp"
#include "emulation/nccl/launch.hpp"

namespace emulation {
namespace {

struct Job {
  CommunicatorPtr communicator;
  std::function<void()> run;
};

struct Batch {
  CommunicatorPtr communicator;
  std::vector<Operation> operations;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Job> jobs;
  std::vector<Batch> batches;  // one for each communicator, in order of its first call
};

thread_local Group group;

Group take_group() {
  Group taken = std::move(group);
  group = Group{};
  return taken;
}

template <class Entries>
bool is_blocking(const Entries& entries) {
  const bool blocks = entries[0].communicator->is_blocking();
  for (const auto& entry : entries) {
    require(entry.communicator->is_blocking() == blocks, ncclInvalidArgument,
            "blocking and non-blocking communicators in one group");
  }
  return blocks;
}

// Runs each in a thread of its own: they may wait for each other.
ncclResult_t run_jobs(std::vector<Job>& jobs) {
  if (jobs.size() == 1 || !is_blocking(jobs)) {
    ncclResult_t result = ncclSuccess;
    for (Job& job : jobs) result = job.communicator->run(std::move(job.run));
    return result;
  }
  std::vector<ncclResult_t> results(jobs.size(), ncclSuccess);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    threads.emplace_back(
        [&, i] { results[i] = guarded([&] { return jobs[i].communicator->run(std::move(jobs[i].run)); }); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const ncclResult_t result : results) {
    if (result != ncclSuccess) fail(result, last_error());
  }
  return ncclSuccess;
}

struct PassOn {
  ~PassOn() { done.set_value(); }
  std::promise<void>& done;
};

void await_turn(const std::shared_future<void>& before, const Communicator& communicator) {
  while (before.valid() && before.wait_for(std::chrono::milliseconds(5)) != std::future_status::ready) {
    if (communicator.stop().load(std::memory_order_relaxed)) throw Interrupted{};
  }
}

void run_batches(std::vector<Batch>& batches) {
  std::deque<Use> uses;
  std::vector<Connections> connections;
  for (const Batch& batch : batches) {
    uses.emplace_back(batch.communicator, "ncclGroupEnd");
    connections.emplace_back(*batch.communicator, batch.operations);
  }
  for (Connections& each : connections) each.await();
  for (Batch& batch : batches) launch(batch.communicator, std::move(batch.operations));
}

// Like a real NCCL: nothing is in the stream before the state says so. Nor may a communicator overtake
// another: ranks whose streams had them in different orders would wait for each other.
ncclResult_t run_batches_in_background(std::vector<Batch>& batches) {
  ncclResult_t result = ncclSuccess;
  std::shared_future<void> before;
  std::vector<const Communicator*> all;
  for (const Batch& batch : batches) all.push_back(batch.communicator.get());
  for (Batch& batch : batches) {
    const auto shared = std::make_shared<Batch>(std::move(batch));
    const CommunicatorPtr communicator = shared->communicator;
    const Fault fault = fault_plan().next("launch", communicator->rank);
    const auto done = std::make_shared<std::promise<void>>();
    result = communicator->run([shared, fault, before, done, all] {
      const PassOn pass_on{*done};
      shared->communicator->require_no_race(all);
      suffer(fault, "ncclGroupEnd", *shared->communicator);
      Connections(*shared->communicator, shared->operations).await();
      await_turn(before, *shared->communicator);
      launch(shared->communicator, std::move(shared->operations));
    });
    before = done->get_future().share();
  }
  return result;
}

bool is_on_one_stream(const std::vector<Batch>& batches) {
  const cudaStream_t first = batches[0].operations[0].stream;
  return std::all_of(batches.begin(), batches.end(), [=](const Batch& batch) {
    return std::all_of(batch.operations.begin(), batch.operations.end(),
                       [=](const Operation& operation) { return operation.stream == first; });
  });
}

void require_one_graph(const std::vector<Batch>& batches) {
  std::optional<cudaGraph_t> known;
  for (const Batch& batch : batches) {
    const DeviceGuard device(batch.communicator->device);
    for (const Operation& operation : batch.operations) {
      cudaGraph_t graph = nullptr;
      check(cudart().graph_of(operation.stream, &graph));
      require(graph == known.value_or(graph), ncclInvalidUsage,
              "the streams of a group must all be captured into one graph, or none of them into any");
      known = graph;
    }
  }
}

// As NCCL has it. Communicators that do not block keep the error.
void check_graphs(const std::vector<Batch>& batches) {
  if (is_on_one_stream(batches)) return;
  try {
    require_one_graph(batches);
  } catch (const Failure& failure) {
    for (const Batch& batch : batches) {
      if (!batch.communicator->is_blocking()) batch.communicator->fail_later(failure.code, failure.text);
    }
    throw;
  }
}

ncclResult_t end_outermost(Group ended) {
  if (ended.error != ncclSuccess) {
    for (const Batch& batch : ended.batches) {
      if (!batch.communicator->is_blocking()) batch.communicator->fail_later(ended.error, last_error());
    }
    return ended.error;
  }
  require(ended.jobs.empty() || ended.batches.empty(), ncclInvalidUsage,
          "communicators made or ended, and communication, in one group");
  if (!ended.jobs.empty()) return run_jobs(ended.jobs);
  if (ended.batches.empty()) return ncclSuccess;
  check_graphs(ended.batches);
  if (!is_blocking(ended.batches)) return run_batches_in_background(ended.batches);
  run_batches(ended.batches);
  return ncclSuccess;
}

template <class Add>
ncclResult_t add_as_group(Add add) {
  start_group();
  add();
  return end_group();
}

}  // namespace

void start_group() { ++group.depth; }

ncclResult_t end_group() {
  require(group.depth > 0, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return group.error;
  return end_outermost(take_group());
}

void poison_group(ncclResult_t code) {
  if (group.depth > 0 && group.error == ncclSuccess) group.error = code;
}

void leak_group_level() { ++group.depth; }

ncclResult_t submit(const CommunicatorPtr& communicator, Operation operation) {
  return add_as_group([&] {
    auto batch = std::find_if(group.batches.begin(), group.batches.end(),
                              [&](const Batch& each) { return each.communicator == communicator; });
    if (batch == group.batches.end()) {
      group.batches.push_back({communicator, {}});
      batch = std::prev(group.batches.end());
    }
    batch->operations.push_back(std::move(operation));
  });
}

ncclResult_t submit(const CommunicatorPtr& communicator, std::function<void()> job) {
  return add_as_group([&] { group.jobs.push_back({communicator, std::move(job)}); });
}

}  // namespace emulation
