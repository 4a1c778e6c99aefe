// What the emulation has of NCCL beyond abi/nccl.h, for programs other than ferro_dist:
// names, values and layouts are those of the real libnccl.so.2, as of 2.32.
#ifndef EMULATION_NCCL_NCCL_ABI_HPP
#define EMULATION_NCCL_NCCL_ABI_HPP

#include <cstddef>
#include <cstdint>

#include "abi/nccl.h"
#include "emulation/cudart/cuda_abi.hpp"

constexpr unsigned kSimInfoMagic = 0x74685283;

// The head of ncclCollConfig_t; the hints behind it do not change a result.
struct ncclCollConfig_t {
  std::size_t size;
  unsigned magic;
  unsigned version;
};

struct ncclSimInfo_t {
  std::size_t size;
  unsigned magic;
  unsigned version;
  float estimatedTime;
};

#endif  // EMULATION_NCCL_NCCL_ABI_HPP
