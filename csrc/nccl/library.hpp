// What the loaded libnccl has.
#ifndef FERRO_NCCL_LIBRARY_HPP
#define FERRO_NCCL_LIBRARY_HPP

#include "abi/nccl.h"
#include "nccl/error.hpp"

namespace ferro::nccl {

// Throws ErrorKind::too_old for a weak function that the library does not have.
template <typename Function>
void require(Function* function, const char* name, const char* since) {
  if (function == nullptr) throw Error(ErrorKind::too_old, name, 0, since);
}

// The error of a call that returned `result`. `comm` may be null.
inline Error error_of(const char* function, ncclResult_t result, ncclComm_t comm) {
  const char* text = ncclGetLastError(comm);
  Error error(ErrorKind::nccl, function, result, text == nullptr ? "" : text);
  error.meaning = ncclGetErrorString(result);
  return error;
}

// What NCCL would say, and not recover from.
inline Error misused(const char* function, const char* detail) {
  Error error(ErrorKind::nccl, function, ncclInvalidUsage, detail);
  error.meaning = ncclGetErrorString(ncclInvalidUsage);
  return error;
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_LIBRARY_HPP
