// Faults on demand: FERRO_EMULATION_FAULT="rank=1,point=allreduce,hit=3,act=hang".
//
//   rank   whose call it is; every rank if not given. Not for mem_alloc, mem_free and malloc.
//   point  a collective by its name, send, recv, put, signal, wait_signal, init, split, shrink, grow,
//          launch (of what non-blocking calls ask for, where a real NCCL connects ranks),
//          finalize, destroy, revoke, register, deregister, mem_alloc, mem_free; malloc for device
//          memory; any
//   hit    at which visit of this process it strikes, counted from 1; 1 if not given
//   ms     how long act=slow takes; 500 if not given
//   act    remote_error   the operation ends unfinished; the communicator's async error says so
//          async_error    the same for an internal error, but the operation is carried out
//          system_error   the call returns it, and nothing is launched
//          out_of_memory  the call returns it, and nothing is allocated or launched
//          hang           the operation never ends, unless it is aborted
//          stuck          the call itself does not return until there is another plan
//          slow           the operation is late
// Several faults are separated by semicolons.
#ifndef EMULATION_FAULT_PLAN_HPP
#define EMULATION_FAULT_PLAN_HPP

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "emulation/environment.hpp"

namespace emulation {

enum class Act { none, remote_error, async_error, system_error, out_of_memory, hang, slow, stuck };

struct Fault {
  Act act = Act::none;
  int ms = 500;
};

class FaultPlan {
 public:
  FaultPlan() {
    if (!set(setting("FAULT"))) std::abort();  // as for any other setting
  }

  // Replaces the plan, and counts from 1 again. Returns false if `text` makes no sense.
  bool set(const std::string& text) {
    std::vector<Entry> entries;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ';');) {
      Entry entry;
      if (!parse(part, entry)) {
        complain("cannot read the fault '", part,
                 "'. Write rank=R,point=P,hit=N,act=A with act one of remote_error, async_error, "
                 "system_error, out_of_memory, hang, slow and stuck. docs/emulation.md names the points.");
        return false;
      }
      entries.push_back(entry);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_ = entries;
    ++num_plans_;
    replaced_.notify_all();
    return true;
  }

  // Counts this visit and returns the fault that is due, if any.
  Fault next(const char* point, int rank = -1) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (Entry& entry : entries_) {
      const bool is_here = entry.point == point || entry.point == "any";
      if (!is_here || (entry.rank >= 0 && entry.rank != rank)) continue;
      if (++entry.visits != entry.hit) continue;
      if (entry.fault.act != Act::stuck) return entry.fault;
      ++num_stuck_;
      replaced_.wait(lock, [this, plan = num_plans_] { return num_plans_ != plan; });
      --num_stuck_;
      return {};
    }
    return {};
  }

  // How many calls are stuck at this moment.
  int num_stuck() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_stuck_;
  }

 private:
  struct Entry {
    Fault fault;
    std::string point;
    int rank = -1;
    int hit = 1;
    int visits = 0;
  };

  // The points that no rank reaches come first.
  static constexpr int kNumPointsWithoutRank = 3;
  static constexpr const char* kPoints[] = {
      "mem_alloc", "mem_free",       "malloc",     "allreduce", "broadcast",  "reduce", "all_gather",
      "gather",    "reduce_scatter", "all_to_all", "scatter",   "send",       "recv",   "put",
      "signal",    "wait_signal",    "launch",     "init",      "split",      "shrink", "grow",
      "finalize",  "destroy",        "revoke",     "register",  "deregister", "any"};

  // A fault that never strikes is refused: what it is to test would pass.
  static bool can_strike(const Entry& entry) {
    const auto* point = std::find(std::begin(kPoints), std::end(kPoints), entry.point);
    if (point == std::end(kPoints)) return false;
    return entry.rank < 0 || point - kPoints >= kNumPointsWithoutRank;
  }

  static bool parse(const std::string& text, Entry& entry) {
    std::istringstream stream(text);
    for (std::string pair; std::getline(stream, pair, ',');) {
      const std::size_t separator = pair.find('=');
      if (separator == std::string::npos) return false;
      if (!apply(entry, pair.substr(0, separator), pair.substr(separator + 1))) return false;
    }
    return entry.fault.act != Act::none && can_strike(entry);
  }

  static bool apply(Entry& entry, const std::string& key, const std::string& value) {
    if (key == "point") return entry.point = value, !value.empty();
    if (key == "act") return entry.fault.act = act_of(value), entry.fault.act != Act::none;
    char* end = nullptr;
    const long number = std::strtol(value.c_str(), &end, 10);
    if (value.empty() || *end != '\0' || number < 0 || number > 1000000) return false;
    if (key == "rank") return entry.rank = static_cast<int>(number), true;
    if (key == "hit") return entry.hit = static_cast<int>(number), number > 0;
    if (key == "ms") return entry.fault.ms = static_cast<int>(number), true;
    return false;
  }

  static Act act_of(const std::string& name) {
    if (name == "remote_error") return Act::remote_error;
    if (name == "async_error") return Act::async_error;
    if (name == "system_error") return Act::system_error;
    if (name == "out_of_memory") return Act::out_of_memory;
    if (name == "hang") return Act::hang;
    if (name == "slow") return Act::slow;
    if (name == "stuck") return Act::stuck;
    return Act::none;
  }

  std::mutex mutex_;
  std::condition_variable replaced_;
  std::vector<Entry> entries_;
  int num_plans_ = 0;
  int num_stuck_ = 0;
};

}  // namespace emulation

#endif  // EMULATION_FAULT_PLAN_HPP
