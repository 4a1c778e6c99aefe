#include "emulation/nccl/operation.hpp"

#include <algorithm>

#include "emulation/nccl/cudart_functions.hpp"
#include "emulation/nccl/element.hpp"
#include "emulation/nccl/version.hpp"

namespace emulation {
namespace {

// How many times `count` an operation reads and writes on one rank; kAll for once per rank.
constexpr int kAll = -1;

struct Description {
  const char* function;
  const char* point;  // in FERRO_EMULATION_FAULT
  int in;
  int out;
  bool in_at_root_only;
  bool out_at_root_only;
  bool has_peer;
  bool is_reduction;
};

constexpr Description kDescriptions[] = {
    {"ncclAllReduce", "allreduce", 1, 1, false, false, false, true},
    {"ncclBroadcast", "broadcast", 1, 1, true, false, true, false},
    {"ncclReduce", "reduce", 1, 1, false, true, true, true},
    {"ncclAllGather", "all_gather", 1, kAll, false, false, false, false},
    {"ncclReduceScatter", "reduce_scatter", kAll, 1, false, false, false, true},
    {"ncclAlltoAll", "all_to_all", kAll, kAll, false, false, false, false},
    {"ncclGather", "gather", 1, kAll, false, true, true, false},
    {"ncclScatter", "scatter", kAll, 1, true, false, true, false},
    {"ncclSend", "send", 1, 0, false, false, true, false},
    {"ncclRecv", "recv", 0, 1, false, false, true, false},
    {"ncclPutSignal", "put", 1, 0, false, false, true, false},
    {"ncclSignal", "signal", 0, 0, false, false, true, false},
    {"ncclWaitSignal", "wait_signal", 0, 0, false, false, false, false},
};

const Description& describe(Kind kind) { return kDescriptions[static_cast<int>(kind)]; }

std::size_t nbytes_of(const Communicator& communicator, const Operation& operation, int times) {
  const std::size_t factor = times == kAll ? static_cast<std::size_t>(communicator.num_ranks) : 1;
  const std::size_t count = times == 0 ? 0 : operation.count;
  const std::size_t nbytes = element_nbytes(operation.dtype);
  require(count <= SIZE_MAX / factor / nbytes, ncclInvalidArgument, function_of(operation.kind), ": count ",
          count, " is too large");
  return count * factor * nbytes;
}

// Like NCCL_CHECK_POINTERS=1, and more: the memory must be alive and large enough.
void check_memory(const Communicator& communicator, const char* function, const char* name, const void* data,
                  std::size_t nbytes) {
  if (nbytes == 0) return;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  int device = 0;
  const int found = cudart().device_range(data, &begin, &end, &device);
  require(found >= 0, ncclInvalidArgument, function, ": ", name, " ", data, " is not memory of a device");
  require(found > 0, ncclInvalidArgument, function, ": ", name, " ", data,
          " is host memory, or was freed before the call");
  require(device == communicator.device, ncclInvalidArgument, function, ": ", name, " ", data,
          " is on device ", device, ", the communicator on device ", communicator.device);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  require(address >= begin && nbytes <= end - address, ncclInvalidArgument, function, ": ", name, " needs ",
          nbytes, " bytes at ", data, ", where the allocation has ", end - address, " left");
}

// Adds tokens of what NCCL knows about the memory. Returns whether it is registered as a whole.
bool use_registered(const Communicator& communicator, const void* data, std::size_t nbytes,
                    std::vector<UseToken>& used) {
  if (nbytes == 0) return true;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  bool is_registered = false;
  for (const auto& [handle, registration] : communicator.registrations) {
    if (begin < registration.begin || begin + nbytes > registration.end) continue;
    is_registered = true;
    used.push_back(registration.token);
  }
  for (const auto& [handle, window] : communicator.windows) {
    if (window->contains(data, communicator.rank)) used.push_back(window->token);
  }
  return is_registered;
}

// The two must coincide where a call is in place, and otherwise not have a byte in common.
void check_overlap(const Communicator& communicator, const Operation& operation, std::size_t in_nbytes,
                   std::size_t out_nbytes) {
  if (in_nbytes == 0 || out_nbytes == 0) return;
  const auto in = reinterpret_cast<std::uintptr_t>(operation.in);
  const auto out = reinterpret_cast<std::uintptr_t>(operation.out);
  if (in + in_nbytes <= out || out + out_nbytes <= in) return;
  const std::size_t own =
      static_cast<std::size_t>(communicator.rank) * (in_nbytes < out_nbytes ? in_nbytes : out_nbytes);
  bool is_in_place = in == out;
  if (in_nbytes < out_nbytes) is_in_place = in == out + own;
  if (in_nbytes > out_nbytes) is_in_place = out == in + own;
  if (operation.kind == Kind::all_to_all && communicator.num_ranks > 1) is_in_place = false;
  require(is_in_place, ncclInvalidArgument, function_of(operation.kind),
          ": the buffers overlap otherwise than in place");
}

bool is_float8(ncclDataType_t dtype) { return dtype == ncclFloat8e4m3 || dtype == ncclFloat8e5m2; }

// NCCL 2.24 brought them.
ncclDataType_t end_of_dtypes() { return loaded_version() < 22400 ? ncclFloat8e4m3 : ncclNumTypes; }

bool is_at_least_hopper(int device) {
  int major = 0;
  check(cudart().device_get_attribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9;
}

void check_reduction(const Communicator& communicator, Operation& operation) {
  const char* function = function_of(operation.kind);
  require(!is_float8(operation.dtype) || is_at_least_hopper(communicator.device), ncclInvalidArgument,
          function, ": ", name_of(operation.dtype), " is reduced by GPUs of sm_90 and newer");
  if (operation.reduction >= 0 && operation.reduction < ncclNumOps) return;
  const auto found = communicator.multipliers.find(operation.reduction);
  require(found != communicator.multipliers.end(), ncclInvalidArgument, function, ": there is no operation ",
          static_cast<int>(operation.reduction),
          " of this communicator; pre-multiplied sums belong to the one they were created with");
  require(found->second.dtype == operation.dtype, ncclInvalidArgument, function,
          ": the pre-multiplied sum was created for ", name_of(found->second.dtype), ", not ",
          name_of(operation.dtype));
  require(communicator.num_ranks > 1 || !is_float8(operation.dtype), ncclInvalidArgument, function,
          ": no pre-multiplied sum of ", name_of(operation.dtype), " of a single rank");
  operation.multiplier = found->second;
  operation.has_multiplier = true;
  operation.reduction = ncclSum;
}

// One of each, unless the configuration asks for more.
int number_of(int configured, int most) {
  return configured == NCCL_CONFIG_UNDEF_INT ? 1 : std::min(configured, most);
}

void check_signal(const Communicator& communicator, int index, int context, const char* function) {
  const int num_signals = number_of(communicator.config.numRmaSig, kMaxSignals);
  const int num_contexts = number_of(communicator.config.numRmaCtx, kMaxSignalContexts);
  require(index >= 0 && index < num_signals && context >= 0 && context < num_contexts, ncclInvalidArgument,
          function, ": the communicator has ", num_signals, " signals in ", num_contexts, " contexts");
}

bool is_in_symmetric_window(const Communicator& communicator, const Operation& operation) {
  return std::any_of(communicator.windows.begin(), communicator.windows.end(), [&](const auto& entry) {
    return entry.second->is_symmetric && entry.second->contains(operation.in, communicator.rank);
  });
}

void check_one_sided(Communicator& communicator, Operation& operation, std::size_t nbytes) {
  const char* function = function_of(operation.kind);
  const bool is_one_sided =
      operation.kind == Kind::put || operation.kind == Kind::signal || operation.kind == Kind::wait_signal;
  require(!is_one_sided || has_windows(), ncclInvalidArgument, function,
          ": no one-sided operations on a communicator that has no windows");
  for (const ncclWaitSignalDesc_t& awaited : operation.awaited) {
    check_signal(communicator, awaited.sigIdx, awaited.ctx, function);
    require(awaited.peer >= 0 && awaited.peer < communicator.num_ranks && awaited.opCnt > 0,
            ncclInvalidArgument, function, ": no such peer, or a count that is not positive");
  }
  if (operation.kind == Kind::put || operation.kind == Kind::signal)
    check_signal(communicator, operation.signal_index, operation.signal_context, function);
  if (operation.kind != Kind::put) return;
  const auto found = communicator.windows.find(operation.window);
  require(found != communicator.windows.end(), ncclInvalidArgument, function,
          ": no window of this communicator");
  operation.target = found->second;
  operation.used.push_back(operation.target->token);
  require(is_in_symmetric_window(communicator, operation), ncclInvalidArgument, function,
          ": what is put is not in a symmetric window");
  const std::uint64_t room = operation.target->nbytes[static_cast<std::size_t>(operation.peer)];
  require(operation.offset <= room && nbytes <= room - operation.offset, ncclInvalidArgument, function, ": ",
          nbytes, " bytes at offset ", operation.offset, " do not fit into the window of ", room,
          " bytes of rank ", operation.peer);
}

}  // namespace

const char* function_of(Kind kind) { return describe(kind).function; }
bool has_peer(Kind kind) { return describe(kind).has_peer; }
bool is_reduction(Kind kind) { return describe(kind).is_reduction; }

void check_operation(Communicator& communicator, Operation& operation) {
  const Description& description = describe(operation.kind);
  if (communicator.is_suspended)
    die(description.function,
        " on a communicator that is suspended: its kernel would use memory that is gone");
  communicator.require_usable(description.function);
  require(operation.dtype >= 0 && operation.dtype < end_of_dtypes(), ncclInvalidArgument,
          description.function, ": there is no dtype ", static_cast<int>(operation.dtype));
  require(!description.has_peer || (operation.peer >= 0 && operation.peer < communicator.num_ranks),
          ncclInvalidArgument, description.function, ": there is no rank ", operation.peer, " of ",
          communicator.num_ranks);
  if (description.is_reduction) check_reduction(communicator, operation);

  const bool is_root = communicator.rank == operation.peer;
  const std::size_t in_nbytes =
      description.in_at_root_only && !is_root ? 0 : nbytes_of(communicator, operation, description.in);
  const std::size_t out_nbytes =
      description.out_at_root_only && !is_root ? 0 : nbytes_of(communicator, operation, description.out);
  check_memory(communicator, description.function, "sendbuff", operation.in, in_nbytes);
  check_memory(communicator, description.function, "recvbuff", operation.out, out_nbytes);
  check_overlap(communicator, operation, in_nbytes, out_nbytes);
  check_one_sided(communicator, operation, in_nbytes);
  const bool is_in_registered = use_registered(communicator, operation.in, in_nbytes, operation.used);
  const bool is_out_registered = use_registered(communicator, operation.out, out_nbytes, operation.used);
  operation.is_registered = is_in_registered && is_out_registered;

  operation.fault = fault_plan().next(description.point, communicator.rank);
  const bool is_at_once =
      operation.fault.act == Act::system_error || operation.fault.act == Act::out_of_memory;
  if (is_at_once) suffer(operation.fault, description.function, communicator);
}

}  // namespace emulation
