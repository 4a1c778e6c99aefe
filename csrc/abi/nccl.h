// NCCL's binary interface, as far as it is used here.
//
// NVIDIA's nccl.h includes the CUDA headers, which no wheel has in full, so that it
// cannot be compiled where this package is built. tests/native/test_nccl_header.py
// compares every line here with the real one.
//
// This file is the one list of functions: setup.py makes the library to link against
// from it, ferro_dist/_native/libnccl.pxd tells Cython of it, and csrc/emulation
// implements it. Each declaration begins its own line with its return type or with
// the attribute.
#ifndef FERRO_ABI_NCCL_H
#define FERRO_ABI_NCCL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/cudart.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm* ncclComm_t;
typedef struct ncclWindow_vidmem* ncclWindow_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,  // since 2.32
  ncclNumResults = 9
} ncclResult_t;

typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,  // the first number of an operation that ncclRedOpCreatePreMulSum makes
  ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,  // since 2.24, like the next
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

typedef enum {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR -1
#define NCCL_API_MAGIC 0xcafebeef
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_STRICT_ORDERING 0x02
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00
#define NCCL_SUSPEND_MEM 0x01

// As of 2.32. A library that is older reads the fields that it knows of and no
// further; a newer one takes its defaults for the fields that are not here. The
// values are those of NCCL_CONFIG_INITIALIZER.
#define NCCL_VERSION_CODE 23203
typedef struct ncclConfig_v23100 {
  size_t size = sizeof(ncclConfig_v23100);
  unsigned int magic = NCCL_API_MAGIC;
  unsigned int version = NCCL_VERSION_CODE;
  int blocking = NCCL_CONFIG_UNDEF_INT;  // fields to here since 2.14
  int cgaClusterSize = NCCL_CONFIG_UNDEF_INT;
  int minCTAs = NCCL_CONFIG_UNDEF_INT;
  int maxCTAs = NCCL_CONFIG_UNDEF_INT;
  const char* netName = NCCL_CONFIG_UNDEF_PTR;  // to here since 2.17
  int splitShare = NCCL_CONFIG_UNDEF_INT;       // since 2.18
  int trafficClass = NCCL_CONFIG_UNDEF_INT;     // since 2.26
  const char* commName = NCCL_CONFIG_UNDEF_PTR;
  int collnetEnable = NCCL_CONFIG_UNDEF_INT;
  int CTAPolicy = NCCL_CONFIG_UNDEF_INT;
  int shrinkShare = NCCL_CONFIG_UNDEF_INT;
  int nvlsCTAs = NCCL_CONFIG_UNDEF_INT;  // to here since 2.27
  int nChannelsPerNetPeer = NCCL_CONFIG_UNDEF_INT;
  int nvlinkCentricSched = NCCL_CONFIG_UNDEF_INT;  // to here since 2.28
  int graphUsageMode = NCCL_CONFIG_UNDEF_INT;
  int numRmaCtx = NCCL_CONFIG_UNDEF_INT;            // to here since 2.29
  int maxP2pPeers = NCCL_CONFIG_UNDEF_INT;          // since 2.30
  int graphStreamOrdering = NCCL_CONFIG_UNDEF_INT;  // to here since 2.30.7
  int launchOrderImplicit = NCCL_CONFIG_UNDEF_INT;
  int numRmaSig = NCCL_CONFIG_UNDEF_INT;
  int rmaEagerInit = NCCL_CONFIG_UNDEF_INT;
  int hostCftMode = NCCL_CONFIG_UNDEF_INT;   // to here since 2.31
  int nvlsHostMode = NCCL_CONFIG_UNDEF_INT;  // since 2.32
} ncclConfig_t;

typedef struct {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
} ncclWaitSignalDesc_t;

// What every supported library has: NCCL 2.21 is the oldest.

ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);

ncclResult_t ncclMemAlloc(void** ptr, size_t size);
ncclResult_t ncclMemFree(void* ptr);
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle);
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle);

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm);
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);

// What newer libraries have. Weak, so that the dynamic linker leaves a null pointer
// where the loaded library lacks one; test it before the call.

// Since 2.23.
__attribute__((weak)) ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank,
                                                            int nId, ncclUniqueId* commIds,
                                                            ncclConfig_t* config);
// Since 2.27.
__attribute__((weak)) ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList,
                                                  int excludeRanksCount, ncclComm_t* newcomm,
                                                  ncclConfig_t* config, int shrinkFlags);
__attribute__((weak)) ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size,
                                                          ncclWindow_t* win, int winFlags);
__attribute__((weak)) ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
// Since 2.28.
__attribute__((weak)) ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                                                ncclDataType_t datatype, ncclComm_t comm,
                                                cudaStream_t stream);
__attribute__((weak)) ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count,
                                              ncclDataType_t datatype, int root, ncclComm_t comm,
                                              cudaStream_t stream);
__attribute__((weak)) ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                                               ncclDataType_t datatype, int root, ncclComm_t comm,
                                               cudaStream_t stream);
// Since 2.28.7.
__attribute__((weak)) ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
// Since 2.29.2.
__attribute__((weak)) ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId);
__attribute__((weak)) ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId,
                                                int rank, ncclComm_t* newcomm, ncclConfig_t* config);
__attribute__((weak)) ncclResult_t ncclPutSignal(const void* localbuff, size_t count, ncclDataType_t datatype,
                                                 int peer, ncclWindow_t peerWin, size_t peerWinOffset,
                                                 int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                                                 cudaStream_t stream);
__attribute__((weak)) ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags,
                                              ncclComm_t comm, cudaStream_t stream);
__attribute__((weak)) ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t* signalDescs,
                                                  ncclComm_t comm, cudaStream_t stream);
// Since 2.29.7.
__attribute__((weak)) ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
__attribute__((weak)) ncclResult_t ncclCommResume(ncclComm_t comm);
__attribute__((weak)) ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);

#ifdef __cplusplus
}
#endif

#endif  // FERRO_ABI_NCCL_H
