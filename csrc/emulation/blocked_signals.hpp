// For starting threads of the emulation, which inherit the mask: signals are for the program's own
// threads, since Python's handlers run in its main one. Those of faults stay, for the report.
#ifndef EMULATION_BLOCKED_SIGNALS_HPP
#define EMULATION_BLOCKED_SIGNALS_HPP

#include <pthread.h>
#include <signal.h>

namespace emulation {

class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace emulation

#endif  // EMULATION_BLOCKED_SIGNALS_HPP
