# NCCL's declarations: csrc/abi/nccl.h, and csrc/nccl, through which it is called.

from libc.stdint cimport uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from ferro_dist._native.libcudart cimport Cudart, cudaStream_t
from ferro_dist._native.nccl_error cimport raise_nccl


cdef extern from "abi/alarm.hpp" namespace "ferro" nogil:
    cdef cppclass Alarm:
        pass


cdef extern from "abi/nccl.h" nogil:
    ctypedef void* ncclWindow_t

    enum:
        NCCL_UNIQUE_ID_BYTES
        NCCL_CONFIG_UNDEF_INT
        NCCL_SPLIT_NOCOLOR
        NCCL_WIN_DEFAULT
        NCCL_WIN_COLL_SYMMETRIC
        NCCL_WIN_REQUIRED_ALIGNMENT
        NCCL_SHRINK_DEFAULT
        NCCL_SHRINK_ABORT

    ctypedef struct ncclUniqueId:
        char internal[128]

    ctypedef enum ncclResult_t:
        ncclSuccess
        ncclInvalidArgument
        ncclInvalidUsage
        ncclRemoteError
        ncclInProgress
        ncclTimeout

    ctypedef enum ncclRedOp_t:
        ncclSum
        ncclProd
        ncclMax
        ncclMin
        ncclAvg

    ctypedef enum ncclDataType_t:
        ncclInt8
        ncclUint8
        ncclInt32
        ncclUint32
        ncclInt64
        ncclUint64
        ncclFloat16
        ncclFloat32
        ncclFloat64
        ncclBfloat16
        ncclFloat8e4m3
        ncclFloat8e5m2
        ncclNumTypes

    ctypedef enum ncclScalarResidence_t:
        ncclScalarHostImmediate

    ctypedef enum ncclCommMemStat_t:
        ncclStatGpuMemSuspend
        ncclStatGpuMemSuspended
        ncclStatGpuMemPersist
        ncclStatGpuMemTotal

    ctypedef struct ncclConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int blocking
        int cgaClusterSize
        int minCTAs
        int maxCTAs
        const char* netName
        int splitShare
        int trafficClass
        const char* commName
        int collnetEnable
        int CTAPolicy
        int shrinkShare
        int nvlsCTAs
        int nChannelsPerNetPeer
        int nvlinkCentricSched
        int graphUsageMode
        int numRmaCtx
        int maxP2pPeers
        int graphStreamOrdering
        int launchOrderImplicit
        int numRmaSig
        int rmaEagerInit
        int hostCftMode
        int nvlsHostMode

    ncclResult_t ncclGetVersion(int* version) noexcept
    ncclResult_t ncclGetUniqueId(ncclUniqueId* unique_id) noexcept
    const char* ncclGetErrorString(ncclResult_t result) noexcept
    const char* ncclGetLastError(void* comm) noexcept


cdef extern from "nccl/error.hpp" namespace "ferro::nccl" nogil:
    cdef enum class ErrorKind(unsigned char):
        none
        nccl
        cuda
        timeout
        interrupted
        aborted
        closed
        forked
        too_old
        out_of_memory
        peer_lost
        peer_left
        deserted
        system

    cdef cppclass Error:
        ErrorKind kind
        const char* function
        int result
        double elapsed_s
        cpp_bool is_attended
        vector[int] missing
        cpp_bool is_fatal
        const char* meaning
        string detail

    Error current_error() noexcept


cdef extern from "nccl/operation.hpp" namespace "ferro::nccl" nogil:
    cdef enum class Op(unsigned char):
        allreduce
        broadcast
        reduce
        all_gather
        reduce_scatter
        all_to_all
        gather
        scatter
        send
        recv
        put
        signal
        wait_signal

    cdef cppclass Operation:
        Op op
        ncclDataType_t dtype
        ncclRedOp_t reduce_op
        int peer
        size_t count
        const void* in_ "in"
        void* out
        cudaStream_t stream
        ncclWindow_t window
        size_t offset
        int signal
        int context
        int signal_count


cdef extern from "nccl/patience.hpp" namespace "ferro::nccl" nogil:
    cdef cppclass Patience:
        Patience() noexcept
        Patience(double timeout_s, cpp_bool (*interrupted)(void*) noexcept, void* context) noexcept
        void heed(const Alarm* alarm) noexcept


cdef extern from "nccl/communicator.hpp" namespace "ferro::nccl" nogil:
    # `Communicator` is the name of what Python sees; the native one is this.
    cdef cppclass Native "ferro::nccl::Communicator":

        @staticmethod
        shared_ptr[Native] init(
            const Cudart& cuda, int device, const vector[ncclUniqueId]& ids, int world_size, int rank,
            ncclConfig_t config, Patience& patience) except +raise_nccl

        @staticmethod
        shared_ptr[Native] join(
            const Cudart& cuda, int device, const ncclUniqueId& unique_id, int world_size, int rank,
            ncclConfig_t config, Patience& patience) except +raise_nccl

        shared_ptr[Native] split(
            int color, int key, ncclConfig_t config, Patience& patience) except +raise_nccl
        shared_ptr[Native] shrink(
            vector[int] excluded, int flags, ncclConfig_t config, Patience& patience) except +raise_nccl
        shared_ptr[Native] grow(
            int world_size, const ncclUniqueId* unique_id, ncclConfig_t config,
            Patience& patience) except +raise_nccl
        ncclUniqueId unique_id(Patience& patience) except +raise_nccl

        void launch(const Operation& operation, Patience& patience) except +raise_nccl

        int rank() noexcept
        int world_size() noexcept
        int device() noexcept

        void* register_buffer(void* data, size_t nbytes, Patience& patience) except +raise_nccl
        void deregister_buffer(void* registration, Patience& patience) except +raise_nccl
        void deregister_later(
            void* registration, cpp_bool (*let_go)(void*) noexcept nogil, void* memory) noexcept
        void let_go_once_ended(cpp_bool (*let_go)(void*) noexcept nogil, void* memory) noexcept
        ncclWindow_t register_window(
            void* data, size_t nbytes, int flags, Patience& patience) except +raise_nccl
        void deregister_window(ncclWindow_t window, Patience& patience) except +raise_nccl
        ncclRedOp_t create_premul_sum(
            void* scalar, ncclDataType_t dtype, ncclScalarResidence_t residence,
            Patience& patience) except +raise_nccl
        void destroy_reduce_op(ncclRedOp_t reduce_op, Patience& patience) except +raise_nccl
        void destroy_reduce_op_later(ncclRedOp_t reduce_op) noexcept

        void suspend(Patience& patience) except +raise_nccl
        void resume(Patience& patience) except +raise_nccl
        uint64_t memory(ncclCommMemStat_t statistic, Patience& patience) except +raise_nccl
        ncclResult_t async_error(Patience& patience) except +raise_nccl

        void finalize(Patience& patience) except +raise_nccl
        void revoke(Patience& patience) except +raise_nccl
        void abort() noexcept
        void wait_ended(Patience& patience) except +raise_nccl
        cpp_bool is_ended() noexcept
        cpp_bool has_failed() noexcept


cdef extern from "nccl/grouped_operation.hpp" namespace "ferro::nccl" nogil:
    cdef cppclass GroupedOperation:
        Native* communicator
        Operation operation

    cpp_bool are_apart(const vector[GroupedOperation]& allreduces) except +raise_nccl
    void launch_group(
        const vector[GroupedOperation]& operations, Patience& patience) except +raise_nccl


cdef extern from "nccl/recording.hpp" namespace "ferro::nccl" nogil:
    void*& current_group() noexcept


cdef extern from "nccl/memory.hpp" namespace "ferro::nccl" nogil:
    void* allocate(
        const Cudart& cuda, int device, size_t nbytes, Patience& patience) except +raise_nccl
    void free "ferro::nccl::free"(
        const Cudart& cuda, int device, void* data, const vector[cudaStream_t]& users,
        Patience& patience) except +raise_nccl
    void free_later(
        const Cudart& cuda, int device, void* data, const vector[cudaStream_t]& users) noexcept


cdef extern from "nccl/reaper.hpp" namespace "ferro::nccl" nogil:
    void end(shared_ptr[Native] communicator, double grace_s) noexcept


cdef extern from "nccl/watchdog.hpp" namespace "ferro::nccl" nogil:
    void shut_down(double grace_s) noexcept
    void on_done(void (*hook)()) noexcept


cdef extern from "nccl/span.hpp" namespace "ferro::nccl" nogil:
    cdef cppclass Span[T]:
        Span() noexcept
        Span(const T* data, size_t size) noexcept
        size_t size() noexcept


cdef extern from "nccl/lane.hpp" namespace "ferro::nccl" nogil:
    cdef cppclass Lane:
        @staticmethod
        shared_ptr[Lane] open(
            shared_ptr[Native] communicator, cudaStream_t stream) except +raise_nccl

        uint64_t launch(
            Span[Operation] operations, Span[cudaStream_t] callers, cpp_bool is_async, double timeout_s,
            Patience& patience) except +raise_nccl
        void hand_back(uint64_t ticket, Span[cudaStream_t] callers) except +raise_nccl
        void synchronize(uint64_t ticket, Patience& patience) except +raise_nccl
        cpp_bool is_done(uint64_t ticket) except +raise_nccl
        uint64_t num_done() except +raise_nccl
        void look_for_done() except +raise_nccl
        uint64_t num_seen_done() noexcept
        uint64_t num_launched() noexcept
        cudaStream_t stream() noexcept
        cpp_bool is_captured() except +raise_nccl
        void heed(Alarm alarm) except +raise_nccl
        void attend(int fd, const vector[int]& members) except +raise_nccl
        void leave(cpp_bool is_aborting) noexcept


cdef extern from "nccl/attendance.hpp" namespace "ferro::nccl" nogil:
    size_t attendance_nbytes "ferro::nccl::Attendance::nbytes"(int num_members) noexcept
