#include "emulation/nccl/launch.hpp"

#include <algorithm>

#include "emulation/nccl/cudart_functions.hpp"

namespace emulation {
namespace {

struct Launch {
  CommunicatorPtr communicator;
  std::vector<Operation> operations;
};

void suffer_before(Communicator& communicator, const Operation& operation) {
  const Act act = operation.fault.act;
  if (act == Act::async_error) return;
  if (act == Act::hang) {
    communicator.segment().await([] { return false; }, communicator.operations_stop());
  }
  suffer(operation.fault, function_of(operation.kind), communicator);
}

void run_one(Communicator& communicator, const Operation& operation) {
  switch (operation.kind) {
    case Kind::put:
      return run_put(communicator, operation);
    case Kind::signal:
      return run_signal(communicator, operation);
    case Kind::wait_signal:
      return run_wait_signal(communicator, operation);
    default:
      return run_collective(communicator, operation);
  }
}

// Collectives in their order, then one-sided operations, then all messages together; waits
// come last, so that nothing of the same group has to wait behind them.
void run_all(const Launch& launch) {
  Communicator& communicator = *launch.communicator;
  for (const Operation& operation : launch.operations) suffer_before(communicator, operation);
  const auto run_those = [&](auto wanted) {
    for (const Operation& operation : launch.operations) {
      if (!wanted(operation)) continue;
      cudart().set_activity(function_of(operation.kind));
      run_one(communicator, operation);
    }
  };
  run_those([](const Operation& operation) { return operation.is_collective(); });
  run_those([](const Operation& operation) {
    return operation.kind == Kind::put || operation.kind == Kind::signal;
  });
  std::vector<const Operation*> transfers;
  for (const Operation& operation : launch.operations) {
    if (operation.is_transfer()) transfers.push_back(&operation);
  }
  if (!transfers.empty()) {
    cudart().set_activity("ncclSend or ncclRecv");
    run_transfers(communicator, transfers);
  }
  run_those([](const Operation& operation) { return operation.kind == Kind::wait_signal; });
}

void report_async_errors(const Launch& launch) {
  for (const Operation& operation : launch.operations) {
    if (operation.fault.act == Act::async_error) {
      launch.communicator->fail_later(
          ncclInternalError,
          std::string(function_of(operation.kind)) + ": internal error, as FERRO_EMULATION_FAULT asks");
    }
  }
}

// Runs in the stream's thread. A launch behind a failed one does nothing: on a GPU it would
// wait for ever.
void run(const Launch& launch) {
  Communicator& communicator = *launch.communicator;
  const std::lock_guard<std::mutex> one_at_a_time(communicator.running);
  if (communicator.operations_stop().load(std::memory_order_relaxed)) return;
  const ncclResult_t state = communicator.state();
  if (state != ncclSuccess && state != ncclInProgress) return;
  try {
    run_all(launch);
    report_async_errors(launch);
  } catch (const Interrupted&) {
  } catch (const Failure& failure) {
    communicator.fail_later(failure.code, failure.text);
  } catch (const std::exception& error) {
    communicator.fail_later(ncclInternalError, error.what());
  }
}

void run_once(void* data) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(data));
  run(*launch);
  launch->communicator->remove_pending();
}

void run_captured(void* data) { run(*static_cast<Launch*>(data)); }

void forget_captured(void* data) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(data));
  launch->communicator->remove_graph();
}

// The graph owns the launch, and with it the communicator's memory, which is why NCCL does not
// end a communicator before its graphs.
void capture(std::unique_ptr<Launch> launch, cudaStream_t stream, cudaGraph_t graph) {
  cudaUserObject_t object = nullptr;
  Launch* const kept = launch.get();
  for (Operation& operation : kept->operations) operation.used.clear();  // it is in flight only when replayed
  Communicator& communicator = *kept->communicator;
  communicator.add_graph();
  check(cudart().user_object_create(&object, launch.release(), forget_captured, 1, 1));
  check(cudart().graph_retain_user_object(graph, object, 1, kGraphUserObjectMove));
  if (communicator.last_captured == nullptr) {
    check(cudart().event_create_with_flags(&communicator.last_captured, cudaEventDisableTiming));
  } else if (communicator.last_graph == graph && communicator.num_ranks > 1) {
    check(cudart().stream_wait_event(stream, communicator.last_captured, 0));
  }
  check(cudart().launch_host_func(stream, run_captured, kept));
  check(cudart().event_record(communicator.last_captured, stream));
  communicator.last_graph = graph;
}

class LocalEvent {
 public:
  LocalEvent() { check(cudart().event_create_with_flags(&handle_, cudaEventDisableTiming)); }
  ~LocalEvent() { cudart().event_destroy(handle_); }
  LocalEvent(const LocalEvent&) = delete;
  LocalEvent& operator=(const LocalEvent&) = delete;

  // Whatever `later` is given from now on comes after what `earlier` holds.
  void order(cudaStream_t earlier, cudaStream_t later) {
    check(cudart().event_record(handle_, earlier));
    check(cudart().stream_wait_event(later, handle_, 0));
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

std::vector<cudaStream_t> other_streams(const std::vector<Operation>& operations) {
  std::vector<cudaStream_t> streams;
  for (const Operation& operation : operations) {
    const bool is_new = std::find(streams.begin(), streams.end(), operation.stream) == streams.end();
    if (operation.stream != operations[0].stream && is_new) streams.push_back(operation.stream);
  }
  return streams;
}

void check_streams(const Communicator& communicator, const std::vector<Operation>& operations) {
  for (const Operation& operation : operations) {
    int device = 0;
    check(cudart().stream_get_device(operation.stream, &device));
    require(device == communicator.device, ncclInvalidArgument, function_of(operation.kind),
            ": the stream is of device ", device, ", the communicator of device ", communicator.device);
  }
}

// Messages to oneself that nobody takes would wait for ever: a real NCCL refuses them.
void check_messages_to_self(const Communicator& communicator, const std::vector<Operation>& operations) {
  int balance = 0;
  for (const Operation& operation : operations) {
    if (!operation.is_transfer() || operation.peer != communicator.rank) continue;
    balance += operation.kind == Kind::send ? 1 : -1;
  }
  require(balance == 0, ncclInvalidUsage,
          "a send to oneself needs a receive from oneself in the same group, and the other way round");
}

// Launches of one communicator follow each other, whatever their streams are, if it has several ranks:
// for a single one NCCL puts nothing in order.
void put_into_stream(const CommunicatorPtr& communicator, std::unique_ptr<Launch> launch,
                     cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  check(cudart().graph_of(stream, &graph));
  if (graph != nullptr) return capture(std::move(launch), stream, graph);
  if (communicator->last_launch == nullptr) {
    check(cudart().event_create_with_flags(&communicator->last_launch, cudaEventDisableTiming));
  } else if (communicator->last_stream != stream && communicator->num_ranks > 1) {
    check(cudart().stream_wait_event(stream, communicator->last_launch, 0));
  }
  communicator->add_pending();
  check(cudart().launch_host_func(stream, run_once, launch.release()));
  check(cudart().event_record(communicator->last_launch, stream));
  communicator->last_stream = stream;
}

}  // namespace

void launch(const CommunicatorPtr& communicator, std::vector<Operation> operations) {
  // Without elements there is nothing to do: such a collective waits for nobody.
  operations.erase(std::remove_if(operations.begin(), operations.end(),
                                  [](const Operation& operation) {
                                    return operation.is_collective() && operation.count == 0;
                                  }),
                   operations.end());
  if (operations.empty()) return;
  const DeviceGuard device(communicator->device);
  check_streams(*communicator, operations);
  check_messages_to_self(*communicator, operations);

  const cudaStream_t stream = operations[0].stream;
  const std::vector<cudaStream_t> others = other_streams(operations);
  LocalEvent event;
  for (const cudaStream_t other : others) event.order(other, stream);
  put_into_stream(communicator, std::make_unique<Launch>(Launch{communicator, std::move(operations)}),
                  stream);
  for (const cudaStream_t other : others) event.order(stream, other);
}

}  // namespace emulation
