# The engine's declarations: csrc/ferro, and python_call.hpp beside this file.

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from ferro_dist._native.native_error cimport raise_native


cdef extern from "ferro/types.hpp" namespace "ferro" nogil:
    cdef enum class DType(unsigned char):
        pass

    cdef enum class ReduceOp(unsigned char):
        pass

    cdef enum class Op(unsigned char):
        allreduce
        broadcast
        reduce
        all_gather
        reduce_scatter
        all_to_all
        gather
        scatter
        barrier
        split
        send
        recv
        sendrecv
        batch

    const char* name_of(Op op) noexcept

    cdef cppclass Collective:
        Op op
        ReduceOp reduce_op
        DType dtype
        int root
        size_t count
        const void* in_ "in"
        void* out
        const size_t* send_counts
        const size_t* recv_counts
        uint32_t tag

    cdef cppclass PointToPoint:
        cpp_bool is_send
        int peer
        void* data
        size_t count
        DType dtype
        uint32_t tag


cdef extern from "ferro/kernels.hpp" namespace "ferro" nogil:
    ctypedef void (*ReduceKernel)(void*, const void* const*, int, size_t, int) noexcept
    ReduceKernel reduce_kernel(DType dtype, ReduceOp op) noexcept
    void copy_past_caches(void* dst, const void* src, size_t nbytes) noexcept
    const char* kernel_isa() noexcept


cdef extern from "ferro/segment.hpp" namespace "ferro" nogil:
    cdef cppclass Segment:
        @staticmethod
        int create_file(int size) except +raise_native


cdef extern from "ferro/life_sign.hpp" namespace "ferro" nogil:
    cpp_bool kernel_notices_deaths() noexcept


cdef extern from "ferro/heap.hpp" namespace "ferro" nogil:
    cdef cppclass Heap:
        void free(void* data) noexcept


cdef extern from "ferro/task.hpp" namespace "ferro" nogil:
    cdef cppclass Task:
        int64_t ended_ns
        cpp_bool is_done() noexcept
        void rethrow() except +raise_native


cdef extern from "ferro/copy_choice.hpp" namespace "ferro" nogil:
    cdef enum class PeerReads(unsigned char):
        automatic
        always
        never


cdef extern from "ferro/communicator.hpp" namespace "ferro" nogil:
    cdef cppclass Wiring:
        int rank
        int world_size
        vector[int] local_ranks
        int segment_fd
        vector[int] collective_sockets
        vector[int] message_sockets
        vector[vector[int]] hosts
        int num_colocated
        int num_cores
        PeerReads peer_reads

    # `Communicator` is the name of what Python sees; the engine's is this.
    cdef cppclass Engine "ferro::Communicator":

        @staticmethod
        shared_ptr[Engine] connect(const Wiring& wiring) except +raise_native

        @staticmethod
        vector[shared_ptr[Engine]] create_group(
            int world_size, int num_cores, PeerReads peer_reads
        ) except +raise_native

        void set_global_ranks(vector[int] ranks) except +
        cpp_bool is_closed() noexcept
        vector[int] lost_ranks() except +raise_native
        uint32_t succession() except +raise_native
        cpp_bool advance_succession(uint32_t before, uint32_t after) except +raise_native
        void supersede() noexcept
        void interrupt() noexcept
        cpp_bool has_ended() noexcept
        shared_ptr[Heap] heap() noexcept
        shared_ptr[Task] submit(const Collective& collective, double timeout_s) except +raise_native
        shared_ptr[Task] submit(Op op, const vector[PointToPoint]& messages,
                                double timeout_s) except +raise_native
        cpp_bool is_done(Task& task) except +raise_native


cdef extern from "abi/alarm.hpp" namespace "ferro" nogil:
    cdef cppclass Alarm:
        Alarm()
        Alarm(const Alarm&) except +raise_native


# To be called with the GIL held: these let go of it themselves.
cdef extern from "python_call.hpp" namespace "ferro::python":
    void run(const shared_ptr[Engine]& engine, const Collective& collective,
             double timeout_s) except +raise_native
    void exchange(const shared_ptr[Engine]& engine, Op op, const vector[PointToPoint]& messages,
                  double timeout_s) except +raise_native
    void wait(const shared_ptr[Engine]& engine, const shared_ptr[Task]& task,
              double timeout_s) except +raise_native
    void* allocate(const shared_ptr[Heap]& heap, size_t nbytes) except +raise_native
    cpp_bool close(const shared_ptr[Engine]& engine) noexcept
    void begin_exit() noexcept
    Alarm alarm_of(const shared_ptr[Engine]& engine) except +raise_native
