// Communicators: made, split, ended, asked.
#include <algorithm>
#include <cstring>

#include "emulation/environment.hpp"
#include "emulation/nccl/calls.hpp"
#include "emulation/nccl/cudart_functions.hpp"
#include "emulation/nccl/group.hpp"

using namespace emulation;

namespace {

constexpr int kMaxChannels = 64;

void require_choice(const char* name, int value, int least, int most) {
  require(value == NCCL_CONFIG_UNDEF_INT || (value >= least && value <= most), ncclInvalidArgument,
          "config: ", name, " is ", value, ", not from ", least, " to ", most);
}

void check_config(const ncclConfig_t& config) {
  require_choice("blocking", config.blocking, 0, 1);
  require_choice("cgaClusterSize", config.cgaClusterSize, 0, 8);
  require_choice("minCTAs", config.minCTAs, 1, INT_MAX);
  require_choice("maxCTAs", config.maxCTAs, 1, INT_MAX);
  // Like the real one, which takes a maximum that is not given for less than any minimum.
  require(config.minCTAs <= config.maxCTAs, ncclInvalidArgument, "config: minCTAs is ", config.minCTAs,
          ", and maxCTAs is less, or not given");
  require_choice("splitShare", config.splitShare, 0, 1);
  require_choice("shrinkShare", config.shrinkShare, 0, 1);
  require_choice("trafficClass", config.trafficClass, 0, INT_MAX);
  require_choice("collnetEnable", config.collnetEnable, 0, 1);
  require_choice("CTAPolicy", config.CTAPolicy, 0, 3);
  require_choice("nvlsCTAs", config.nvlsCTAs, 1, INT_MAX);
  require_choice("nChannelsPerNetPeer", config.nChannelsPerNetPeer, 1, kMaxChannels);
  require_choice("nvlinkCentricSched", config.nvlinkCentricSched, 0, 1);
  require_choice("graphUsageMode", config.graphUsageMode, 0, 2);
  require_choice("numRmaCtx", config.numRmaCtx, 0, INT_MAX);
  require_choice("maxP2pPeers", config.maxP2pPeers, 1, INT_MAX);
  require_choice("graphStreamOrdering", config.graphStreamOrdering, 0, 1);
  require_choice("numRmaSig", config.numRmaSig, 0, INT_MAX);
}

// The caller's configuration, as much of it as its version of the struct has; `otherwise` if there is none.
// Then what the environment overrides.
ncclConfig_t resolve(const ncclConfig_t* given, const ncclConfig_t& otherwise) {
  ncclConfig_t config;
  if (given == nullptr) {
    config = otherwise;
  } else {
    require(given->magic == NCCL_API_MAGIC && given->size >= offsetof(ncclConfig_t, blocking),
            ncclInvalidArgument, "the ncclConfig_t was not initialized with NCCL_CONFIG_INITIALIZER");
    std::memcpy(static_cast<void*>(&config), given, std::min(given->size, sizeof config));
    check_config(config);
  }
  if (config.blocking == NCCL_CONFIG_UNDEF_INT) config.blocking = 1;
  const long forced = nccl_setting("NCCL_COMM_BLOCKING", NCCL_CONFIG_UNDEF_INT);
  if (forced == 0 || forced == 1) config.blocking = static_cast<int>(forced);
  return config;
}

int current_device() {
  int device = 0;
  check(cudart().get_device(&device));
  return device;
}

// Gives out the handle at once, as non-blocking calls need it; takes it back if making
// the communicator fails before the call returns.
ncclResult_t make(ncclComm_t* out, const CommunicatorPtr& made, const char* point, const char* function,
                  const std::function<void()>& find_out = {}) {
  *out = add_handle(made);
  const ncclComm_t handle = *out;
  const Fault fault = fault_plan().next(point, made->rank);
  try {
    if (fault.act == Act::system_error || fault.act == Act::out_of_memory) suffer(fault, function, *made);
    return submit(made, [made, fault, function, find_out] {
      suffer(fault, function, *made);
      if (find_out) find_out();
      made->connect();
    });
  } catch (...) {
    end_handle(handle, function);
    *out = nullptr;
    throw;
  }
}

ncclResult_t init(ncclComm_t* out, int num_ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* given,
                  const char* function) {
  require(out != nullptr, ncclInvalidArgument, function, ": the communicator is NULL");
  *out = nullptr;
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, ncclInvalidArgument, function, ": ", num_ranks,
          " ranks; the emulation takes 1 to ", kMaxRanks);
  require(rank >= 0 && rank < num_ranks, ncclInvalidArgument, function, ": there is no rank ", rank, " of ",
          num_ranks);
  require(is_unique_id(id), ncclInvalidArgument, function, ": the unique id is not one of ncclGetUniqueId");
  const ncclConfig_t config = resolve(given, ncclConfig_t{});
  return make(out, std::make_shared<Communicator>(id, rank, num_ranks, current_device(), config), "init",
              function);
}

// A child of `parent`, whose rank and size the job will find out.
CommunicatorPtr new_child(const Communicator& parent, const ncclConfig_t* given) {
  const ncclConfig_t config = resolve(given, parent.config);
  return std::make_shared<Communicator>(parent.id, 0, 1, parent.device, config);
}

// As the real one: what makes a communicator out of another says success even if it has only begun.
// A caller who does not ask for the state takes what is not there.
ncclResult_t begun(ncclResult_t result) { return result == ncclInProgress ? ncclSuccess : result; }

// A child's making is its parent's job: both are in progress until it is done, when the caller gets the
// handle.
ncclResult_t make_child(ncclComm_t* out, const CommunicatorPtr& parent, const CommunicatorPtr& child,
                        const std::function<void()>& find_out, const char* function) {
  if (!child) return begun(submit(parent, find_out));
  const ncclComm_t handle = add_handle(child);
  parent->begin_child(child);
  try {
    return begun(submit(parent, [=] {
      // However it ends: the child can be found, and is in progress no longer.
      const std::shared_ptr<void> always(nullptr, [&](void*) {
        *out = handle;
        parent->end_child();
      });
      try {
        find_out();
        child->connect();
      } catch (const Failure& failure) {
        child->fail_later(failure.code, failure.text);
        throw;
      } catch (const Interrupted&) {
        child->fail_later(ncclInternalError, "aborted");
        throw;
      }
    }));
  } catch (...) {
    end_handle(handle, function);
    *out = nullptr;
    throw;
  }
}

struct SplitWish {
  int color;
  int key;
  int rank;
};

// Ranks of one color, by key, then by their old rank.
void find_out_split(const Communicator& parent, Communicator* child, const std::vector<SplitWish>& wishes,
                    std::uint64_t successor) {
  if (child == nullptr) return;
  std::vector<SplitWish> members;
  const int color = wishes[static_cast<std::size_t>(parent.rank)].color;
  std::copy_if(wishes.begin(), wishes.end(), std::back_inserter(members),
               [&](const SplitWish& wish) { return wish.color == color; });
  std::stable_sort(members.begin(), members.end(),
                   [](const SplitWish& a, const SplitWish& b) { return a.key < b.key; });
  const auto self = std::find_if(members.begin(), members.end(),
                                 [&](const SplitWish& wish) { return wish.rank == parent.rank; });
  child->rank = static_cast<int>(self - members.begin());
  child->num_ranks = static_cast<int>(members.size());
  const std::uint64_t words[] = {1, successor, static_cast<std::uint64_t>(color)};
  child->id = derive_unique_id(parent.id, words, 3);
}

void find_out_shrink(const Communicator& parent, Communicator& child, std::vector<int> excluded,
                     std::uint64_t successor) {
  std::sort(excluded.begin(), excluded.end());
  const auto before = std::lower_bound(excluded.begin(), excluded.end(), parent.rank) - excluded.begin();
  child.rank = parent.rank - static_cast<int>(before);
  child.num_ranks = parent.num_ranks - static_cast<int>(excluded.size());
  std::vector<std::uint64_t> words = {2, successor};
  for (const int rank : excluded) words.push_back(static_cast<std::uint64_t>(rank));
  child.id = derive_unique_id(parent.id, words.data(), static_cast<int>(words.size()));
}

std::vector<int> checked_exclusion(const Communicator& parent, const int* ranks, int count) {
  require(ranks != nullptr && count > 0 && count < parent.num_ranks, ncclInvalidArgument,
          "ncclCommShrink: ", count, " ranks to exclude of ", parent.num_ranks);
  std::vector<int> excluded(ranks, ranks + count);
  std::sort(excluded.begin(), excluded.end());
  const bool has_twice = std::adjacent_find(excluded.begin(), excluded.end()) != excluded.end();
  require(!has_twice && excluded.front() >= 0 && excluded.back() < parent.num_ranks, ncclInvalidArgument,
          "ncclCommShrink: the ranks to exclude are not all different ranks of the communicator");
  require(!std::binary_search(excluded.begin(), excluded.end(), parent.rank), ncclInvalidArgument,
          "ncclCommShrink: called by rank ", parent.rank, ", which it excludes");
  return excluded;
}

struct GrowOffer {
  int has_id;
  ncclUniqueId id;
};

// Every old rank learns the id from the one that has it. As with the real one, what waits here, on the
// connections of the parent, hears of an abort or a revocation of the parent alone.
void find_out_grow(Communicator& parent, Communicator& child, const ncclUniqueId* id) {
  GrowOffer mine{};
  mine.has_id = id != nullptr;
  if (id != nullptr) mine.id = *id;
  std::vector<GrowOffer> offers(static_cast<std::size_t>(parent.num_ranks));
  parent.segment().exchange(&mine, sizeof mine, offers.data(), parent.operations_stop());
  const auto count =
      std::count_if(offers.begin(), offers.end(), [](const auto& offer) { return offer.has_id; });
  require(count == 1, ncclInvalidArgument, "ncclCommGrow: ", count, " ranks passed a unique id; one has to");
  child.id = std::find_if(offers.begin(), offers.end(), [](const auto& offer) { return offer.has_id; })->id;
}

// The id is for the next communicator that is made out of this one, as ncclCommGetUniqueId took it.
void take_growth(Communicator& parent, const ncclUniqueId& id) {
  const bool is_known = parent.growth && std::memcmp(&parent.growth->id, &id, sizeof id) == 0;
  require(is_known, ncclInvalidArgument,
          "ncclCommGrow: the unique id is not one of ncclCommGetUniqueId of this communicator");
  require(parent.growth->child == parent.num_children, ncclInvalidArgument,
          "ncclCommGrow: the communicator has been split since ncclCommGetUniqueId");
  parent.growth.reset();
}

void end_work(const CommunicatorPtr& communicator, const char* function) {
  if (!communicator->is_finalized && !communicator->is_revoked) communicator->finalize();
  communicator->synchronize();
  communicator->await_graphs(function);
  communicator->release();
}

ncclResult_t destroy(ncclComm_t handle) {
  const char* function = "ncclCommDestroy";
  const Use use(handle, function);
  const ncclResult_t state = use->state();
  if (state != ncclSuccess) {
    // Like the real one: it returns before it closes the group level that it opened, so
    // that all later calls of this thread are queued and never run.
    leak_group_level();
    set_last_error(std::string(function) +
                   " on a communicator in error or in progress: this thread's group level is lost now; abort "
                   "such a communicator instead");
    return state == ncclInProgress ? ncclInvalidArgument : state;
  }
  const CommunicatorPtr communicator = use.get();
  const Fault fault = fault_plan().next("destroy", communicator->rank);
  communicator->is_ending = true;
  end_handle(handle, function);
  return submit(communicator, [communicator, fault, function] {
    suffer(fault, function, *communicator);
    end_work(communicator, function);
  });
}

void abort_communicator(ncclComm_t handle) {
  const char* function = "ncclCommAbort";
  const CommunicatorPtr communicator = find_communicator(handle, function);
  const std::thread::id inside = communicator->user.load(std::memory_order_acquire);
  if (communicator->is_blocking() && inside != std::thread::id{} && inside != std::this_thread::get_id()) {
    die(function,
        " of a blocking communicator while another thread is inside a call on it: only a "
        "non-blocking communicator can be aborted then");
  }
  end_handle(handle, function);
  communicator->abort();
  communicator->synchronize();
  communicator->await_graphs(function);
  communicator->release();
}

template <class Value, class Get>
ncclResult_t ask(ncclComm_t handle, Value* out, const char* function, Get get) {
  return guarded([&] {
    const CommunicatorPtr communicator = find_communicator(handle, function);
    require(out != nullptr, ncclInvalidArgument, function, ": the result is NULL");
    const ncclResult_t state = communicator->state();
    require(state != ncclInProgress, ncclInvalidArgument, function,
            " while the communicator is in progress: poll ncclCommGetAsyncError until it is not");
    *out = get(*communicator);
    return ncclSuccess;
  });
}

ncclResult_t submit_job(const char* function, const char* point, const CommunicatorPtr& communicator,
                        std::function<void()> job) {
  const Fault fault = fault_plan().next(point, communicator->rank);
  return submit(communicator, [=] {
    suffer(fault, function, *communicator);
    job();
  });
}

}  // namespace

EMULATION_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded([&] {
    require(id != nullptr, ncclInvalidArgument, "ncclGetUniqueId: the id is NULL");
    *id = make_unique_id();
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                                  ncclConfig_t* config) {
  return guarded([&] { return init(comm, num_ranks, id, rank, config, "ncclCommInitRankConfig"); });
}

EMULATION_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  return guarded([&] { return init(comm, num_ranks, id, rank, nullptr, "ncclCommInitRank"); });
}

EMULATION_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int num_ranks, int rank, int num_ids,
                                                    ncclUniqueId* ids, ncclConfig_t* config) {
  return guarded([&] {
    require(ids != nullptr && num_ids >= 1 && num_ids <= num_ranks, ncclInvalidArgument,
            "ncclCommInitRankScalable: ", num_ids, " unique ids for ", num_ranks, " ranks");
    // All ids go into the one under which the ranks meet, so that differing lists do not.
    std::vector<std::uint64_t> words;
    for (int i = 0; i < num_ids; ++i) {
      require(is_unique_id(ids[i]), ncclInvalidArgument, "ncclCommInitRankScalable: unique id ", i,
              " is not one of ncclGetUniqueId");
      std::uint64_t halves[2];
      std::memcpy(halves, ids[i].internal + 8, sizeof halves);
      words.insert(words.end(), {halves[0], halves[1]});
    }
    const ncclUniqueId id = derive_unique_id(ids[0], words.data(), static_cast<int>(words.size()));
    return init(comm, num_ranks, id, rank, config, "ncclCommInitRankScalable");
  });
}

EMULATION_API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int num_devices, const int* devices) {
  return guarded([&] {
    require(comms != nullptr && num_devices > 0, ncclInvalidArgument, "ncclCommInitAll: no devices");
    const ncclUniqueId id = make_unique_id();
    start_group();
    for (int rank = 0; rank < num_devices; ++rank) {
      const DeviceGuard device(devices == nullptr ? rank : devices[rank]);
      init(&comms[rank], num_devices, id, rank, nullptr, "ncclCommInitAll");
    }
    return end_group();
  });
}

EMULATION_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out,
                                         ncclConfig_t* config) {
  return guarded([&] {
    const Use parent(comm, "ncclCommSplit");
    require(out != nullptr, ncclInvalidArgument, "ncclCommSplit: the communicator is NULL");
    *out = nullptr;
    parent->require_ready("ncclCommSplit");
    parent->require_not_finalized("ncclCommSplit");
    require(color >= NCCL_SPLIT_NOCOLOR, ncclInvalidArgument, "ncclCommSplit: color is ", color);
    const CommunicatorPtr owner = parent.get();
    const CommunicatorPtr child = color == NCCL_SPLIT_NOCOLOR ? nullptr : new_child(*owner, config);
    if (child && owner->config.splitShare == 1 && !owner->is_revoked) child->share_with(owner);
    const std::uint64_t successor = owner->next_successor();
    ++owner->num_children;
    const Fault fault = fault_plan().next("split", owner->rank);
    return make_child(
        out, owner, child,
        [=] {
          suffer(fault, "ncclCommSplit", *owner);
          const SplitWish mine{color, key, owner->rank};
          std::vector<SplitWish> wishes(static_cast<std::size_t>(owner->num_ranks));
          owner->segment().exchange(&mine, sizeof mine, wishes.data(), owner->stop());
          find_out_split(*owner, child.get(), wishes, successor);
        },
        "ncclCommSplit");
  });
}

EMULATION_API ncclResult_t ncclCommShrink(ncclComm_t comm, int* ranks, int count, ncclComm_t* out,
                                          ncclConfig_t* config, int flags) {
  return guarded([&] {
    require(out != nullptr, ncclInvalidArgument, "ncclCommShrink: the communicator is NULL");
    *out = nullptr;
    const Use parent(comm, "ncclCommShrink");
    const CommunicatorPtr owner = parent.get();
    const bool aborts = (flags & NCCL_SHRINK_ABORT) != 0;
    if (aborts) {
      require(owner->state() != ncclInProgress, ncclInvalidArgument, "ncclCommShrink in progress");
      owner->stop_all_operations();
      owner->forget_error();
      owner->is_revoked = true;
    }
    owner->require_ready("ncclCommShrink");
    owner->require_not_finalized("ncclCommShrink");
    const std::vector<int> excluded = checked_exclusion(*owner, ranks, count);
    const CommunicatorPtr child = new_child(*owner, config);
    if (!aborts && owner->config.shrinkShare == 1 && !owner->is_revoked) child->share_with(owner);
    const std::uint64_t successor = owner->next_successor();
    const Fault fault = fault_plan().next("shrink", owner->rank);
    return make_child(
        out, owner, child,
        [=] {
          suffer(fault, "ncclCommShrink", *owner);
          find_out_shrink(*owner, *child, excluded, successor);
        },
        "ncclCommShrink");
  });
}

EMULATION_API ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  return guarded([&] {
    const Use parent(comm, "ncclCommGetUniqueId");
    require(id != nullptr, ncclInvalidArgument, "ncclCommGetUniqueId: the id is NULL");
    parent->require_usable("ncclCommGetUniqueId");
    if (parent->growth) {
      die("ncclCommGetUniqueId twice before ncclCommGrow: ranks that join would look for the others under "
          "another id than the first");
    }
    *id = make_unique_id();
    parent->growth = Growth{*id, parent->num_children + 1};
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommGrow(ncclComm_t comm, int num_ranks, const ncclUniqueId* id, int rank,
                                        ncclComm_t* out, ncclConfig_t* config) {
  return guarded([&] {
    require(out != nullptr, ncclInvalidArgument, "ncclCommGrow: the communicator is NULL");
    *out = nullptr;
    if (comm == nullptr) {
      require(id != nullptr, ncclInvalidArgument, "ncclCommGrow: a new rank needs the unique id");
      return begun(init(out, num_ranks, *id, rank, config, "ncclCommGrow"));
    }
    const Use parent(comm, "ncclCommGrow");
    parent->require_usable("ncclCommGrow");
    const CommunicatorPtr owner = parent.get();
    require(rank == -1, ncclInvalidArgument, "ncclCommGrow: a rank that is there already passes -1, not ",
            rank);
    require(num_ranks > owner->num_ranks && num_ranks <= kMaxRanks, ncclInvalidArgument,
            "ncclCommGrow: from ", owner->num_ranks, " to ", num_ranks, " ranks");
    ++owner->num_children;
    const bool has_id = id != nullptr;
    if (has_id) take_growth(*owner, *id);
    const CommunicatorPtr child = new_child(*owner, config);
    const ncclUniqueId copy = has_id ? *id : ncclUniqueId{};
    child->rank = owner->rank;
    child->num_ranks = num_ranks;
    // The child's own job, unlike those of other children: its parent says that it is ready meanwhile.
    return begun(make(out, child, "grow", "ncclCommGrow",
                      [=] { find_out_grow(*owner, *child, has_id ? &copy : nullptr); }));
  });
}

EMULATION_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded([&] {
    const Use use(comm, "ncclCommFinalize");
    use->require_ready("ncclCommFinalize");
    require(!use->is_revoked, ncclInvalidUsage, "ncclCommFinalize after ncclCommRevoke");
    require(!use->is_finalized, ncclInvalidArgument, "ncclCommFinalize twice");
    const CommunicatorPtr communicator = use.get();
    return submit_job("ncclCommFinalize", "finalize", communicator,
                      [communicator] { communicator->finalize(); });
  });
}

EMULATION_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded([&] { return comm == nullptr ? ncclSuccess : destroy(comm); });
}

EMULATION_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return guarded([&] {
    if (comm != nullptr) abort_communicator(comm);
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  return guarded([&] {
    const CommunicatorPtr communicator = find_communicator(comm, "ncclCommRevoke");
    require(flags == 0, ncclInvalidArgument, "ncclCommRevoke: flags must be NCCL_REVOKE_DEFAULT");
    communicator->require_ready("ncclCommRevoke");
    require(!communicator->is_finalized && !communicator->is_revoked, ncclInvalidArgument,
            "ncclCommRevoke of a communicator that was finalized or revoked before");
    return submit_job("ncclCommRevoke", "revoke", communicator, [communicator] { communicator->revoke(); });
  });
}

EMULATION_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return guarded([&] {
    require(error != nullptr, ncclInvalidArgument, "ncclCommGetAsyncError: the result is NULL");
    *error = find_communicator(comm, "ncclCommGetAsyncError")->state();
    return ncclSuccess;
  });
}

EMULATION_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return ask(comm, count, "ncclCommCount", [](const Communicator& each) { return each.num_ranks; });
}

EMULATION_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return ask(comm, device, "ncclCommCuDevice", [](const Communicator& each) { return each.device; });
}

EMULATION_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return ask(comm, rank, "ncclCommUserRank", [](const Communicator& each) { return each.rank; });
}
