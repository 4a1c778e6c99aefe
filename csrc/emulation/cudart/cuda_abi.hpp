// What the emulation has of the CUDA runtime beyond abi/cudart.h, for programs other
// than ferro_dist: names, values and layouts are those of the real libcudart.
#ifndef EMULATION_CUDART_CUDA_ABI_HPP
#define EMULATION_CUDART_CUDA_ABI_HPP

#include <cstddef>

#include "abi/cudart.h"
#include "emulation/export.hpp"

constexpr cudaError_t cudaErrorInvalidMemcpyDirection = static_cast<cudaError_t>(21);
constexpr cudaError_t cudaErrorNotPermitted = static_cast<cudaError_t>(800);
constexpr cudaError_t cudaErrorStreamCaptureInvalidated = static_cast<cudaError_t>(901);
constexpr cudaError_t cudaErrorStreamCaptureMerge = static_cast<cudaError_t>(902);
constexpr cudaError_t cudaErrorStreamCaptureUnmatched = static_cast<cudaError_t>(903);
constexpr cudaError_t cudaErrorStreamCaptureUnjoined = static_cast<cudaError_t>(904);
constexpr cudaError_t cudaErrorStreamCaptureIsolation = static_cast<cudaError_t>(905);
constexpr cudaError_t cudaErrorCapturedEvent = static_cast<cudaError_t>(907);
constexpr cudaError_t cudaErrorStreamCaptureWrongThread = static_cast<cudaError_t>(908);

// Handles are numbers of these types, and point to nothing.
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaUserObject_t = struct CUuserObject_st*;
using cudaHostFn_t = void (*)(void*);

constexpr unsigned kGraphUserObjectMove = 0x1;

#endif  // EMULATION_CUDART_CUDA_ABI_HPP
