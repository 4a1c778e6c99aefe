// The version of NCCL that the library says it is.
#ifndef EMULATION_NCCL_VERSION_HPP
#define EMULATION_NCCL_VERSION_HPP

#include "abi/nccl.h"
#include "emulation/environment.hpp"

namespace emulation {

inline int loaded_version() {
  static const auto version = static_cast<int>(setting("NCCL_VERSION", NCCL_VERSION_CODE, 2000, 99999));
  return version;
}

}  // namespace emulation

#endif  // EMULATION_NCCL_VERSION_HPP
