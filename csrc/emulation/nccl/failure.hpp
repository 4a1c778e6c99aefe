// How an error travels through the emulated NCCL.
#ifndef EMULATION_NCCL_FAILURE_HPP
#define EMULATION_NCCL_FAILURE_HPP

#include <sstream>
#include <string>

#include "abi/nccl.h"

namespace emulation {

// Thrown inside the library; at its border the code is returned and the text becomes
// what ncclGetLastError says.
struct Failure {
  ncclResult_t code;
  std::string text;
};

// Thrown by a wait that an abort or a revocation ended.
struct Interrupted {};

template <class... Parts>
[[noreturn]] void fail(ncclResult_t code, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Failure{code, text.str()};
}

template <class... Parts>
void require(bool condition, ncclResult_t code, const Parts&... parts) {
  if (!condition) fail(code, parts...);
}

}  // namespace emulation

#endif  // EMULATION_NCCL_FAILURE_HPP
