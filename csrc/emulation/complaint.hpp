// What the emulation says about a program that breaks the rules of CUDA or NCCL: one
// line on stderr, and in the worst case the end of the process.
#ifndef EMULATION_COMPLAINT_HPP
#define EMULATION_COMPLAINT_HPP

#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <string>

namespace emulation {

// One write: what several ranks say at once does not mix.
template <class... Parts>
void complain(const Parts&... parts) {
  std::ostringstream line;
  line << "ferro_dist GPU emulation [pid " << getpid() << "]: ";
  (line << ... << parts) << '\n';
  const std::string text = line.str();
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;  // nobody listens
}

// For what is undefined behaviour on a GPU: going on would hide it.
template <class... Parts>
[[noreturn]] void die(const Parts&... parts) {
  complain(parts...);
  std::abort();
}

}  // namespace emulation

#endif  // EMULATION_COMPLAINT_HPP
