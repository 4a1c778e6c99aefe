// The CUDA runtime's functions as values.
//
// There are two CUDA runtimes, and which one a process uses is known only when it
// runs: a module linked against libcudart.so.12 would load a second one beside
// torch's 13. So only cudart.pyx is linked, once against each; the one that is
// imported hands this table out in a capsule, and everybody else calls through it,
// at the price of one indirect call.
#ifndef FERRO_ABI_CUDART_TABLE_HPP
#define FERRO_ABI_CUDART_TABLE_HPP

#include "abi/cudart.h"

namespace ferro {

struct Cudart {
  decltype(&::cudaGetErrorName) cudaGetErrorName = ::cudaGetErrorName;
  decltype(&::cudaGetErrorString) cudaGetErrorString = ::cudaGetErrorString;
  decltype(&::cudaGetLastError) cudaGetLastError = ::cudaGetLastError;
  decltype(&::cudaRuntimeGetVersion) cudaRuntimeGetVersion = ::cudaRuntimeGetVersion;
  decltype(&::cudaDriverGetVersion) cudaDriverGetVersion = ::cudaDriverGetVersion;

  decltype(&::cudaGetDeviceCount) cudaGetDeviceCount = ::cudaGetDeviceCount;
  decltype(&::cudaGetDevice) cudaGetDevice = ::cudaGetDevice;
  decltype(&::cudaSetDevice) cudaSetDevice = ::cudaSetDevice;
  decltype(&::cudaDeviceGetAttribute) cudaDeviceGetAttribute = ::cudaDeviceGetAttribute;

  decltype(&::cudaStreamCreateWithFlags) cudaStreamCreateWithFlags = ::cudaStreamCreateWithFlags;
  decltype(&::cudaStreamCreateWithPriority) cudaStreamCreateWithPriority = ::cudaStreamCreateWithPriority;
  decltype(&::cudaStreamDestroy) cudaStreamDestroy = ::cudaStreamDestroy;
  decltype(&::cudaStreamSynchronize) cudaStreamSynchronize = ::cudaStreamSynchronize;
  decltype(&::cudaStreamQuery) cudaStreamQuery = ::cudaStreamQuery;
  decltype(&::cudaStreamWaitEvent) cudaStreamWaitEvent = ::cudaStreamWaitEvent;
  decltype(&::cudaStreamIsCapturing) cudaStreamIsCapturing = ::cudaStreamIsCapturing;
  decltype(&::cudaThreadExchangeStreamCaptureMode) cudaThreadExchangeStreamCaptureMode =
      ::cudaThreadExchangeStreamCaptureMode;

  decltype(&::cudaEventCreateWithFlags) cudaEventCreateWithFlags = ::cudaEventCreateWithFlags;
  decltype(&::cudaEventDestroy) cudaEventDestroy = ::cudaEventDestroy;
  decltype(&::cudaEventRecord) cudaEventRecord = ::cudaEventRecord;
  decltype(&::cudaEventQuery) cudaEventQuery = ::cudaEventQuery;
  decltype(&::cudaEventSynchronize) cudaEventSynchronize = ::cudaEventSynchronize;

  decltype(&::cudaMalloc) cudaMalloc = ::cudaMalloc;
  decltype(&::cudaFree) cudaFree = ::cudaFree;
  decltype(&::cudaHostAlloc) cudaHostAlloc = ::cudaHostAlloc;
  decltype(&::cudaFreeHost) cudaFreeHost = ::cudaFreeHost;
  decltype(&::cudaMemcpyAsync) cudaMemcpyAsync = ::cudaMemcpyAsync;
  decltype(&::cudaMemsetAsync) cudaMemsetAsync = ::cudaMemsetAsync;
  decltype(&::cudaPointerGetAttributes) cudaPointerGetAttributes = ::cudaPointerGetAttributes;
};

}  // namespace ferro

#endif  // FERRO_ABI_CUDART_TABLE_HPP
