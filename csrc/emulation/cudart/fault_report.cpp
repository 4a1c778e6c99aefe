// Says what a segmentation fault was about, if it lies in memory of the emulation.
#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulation/cudart/runtime.hpp"

namespace emulation {
namespace {

struct sigaction previous_handler;

const char* name_of(MemoryKind kind) { return kind == MemoryKind::pinned ? "pinned host" : "device"; }

const char* diagnosis(const Allocation& allocation, std::uintptr_t address) {
  if (allocation.is_freed) return "that was freed: keep it alive until the work that uses it is done";
  return address < allocation.base ? "in front of which it lies" : "past whose end it lies";
}

// snprintf and write: this runs in a signal handler.
void report(const Allocation& allocation, std::uintptr_t address) {
  char text[512];
  const Activity activity = current_activity();
  char who[160];
  if (activity.operation != nullptr) {
    std::snprintf(who, sizeof who, "%s, in stream %p of device %d,", activity.operation,
                  static_cast<void*>(activity.stream), activity.device);
  } else {
    std::snprintf(who, sizeof who, "a thread of the program");
  }
  const int length = std::snprintf(text, sizeof text,
                                   "ferro_dist GPU emulation [pid %d]: %s touched %#zx, at offset %td of %zu "
                                   "bytes of %s memory at %#zx %s.\n",
                                   getpid(), who, static_cast<std::size_t>(address),
                                   static_cast<std::ptrdiff_t>(address - allocation.base), allocation.nbytes,
                                   name_of(allocation.kind), static_cast<std::size_t>(allocation.base),
                                   diagnosis(allocation, address));
  if (length > 0 && write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) return;
}

void on_fault(int signal_number, siginfo_t* info, void* context) {
  Allocation allocation;
  if (runtime().memory.find_from_handler(info->si_addr, &allocation)) {
    report(allocation, reinterpret_cast<std::uintptr_t>(info->si_addr));
    std::abort();
  }
  // Not ours: behave as if we were not there. The previous handler may be of one kind or the
  // other; if there was none, the instruction faults again, and ends the process.
  if ((previous_handler.sa_flags & SA_SIGINFO) != 0) {
    previous_handler.sa_sigaction(signal_number, info, context);
  } else if (previous_handler.sa_handler != SIG_DFL && previous_handler.sa_handler != SIG_IGN) {
    previous_handler.sa_handler(signal_number);
  } else {
    sigaction(signal_number, &previous_handler, nullptr);
  }
}

}  // namespace

void install_fault_report() {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_handler);
}

}  // namespace emulation
