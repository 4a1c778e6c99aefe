// Memory that NCCL allocates so that communicators reach it best.
#ifndef FERRO_NCCL_MEMORY_HPP
#define FERRO_NCCL_MEMORY_HPP

#include <cstddef>
#include <vector>

#include "abi/cudart_table.hpp"
#include "nccl/patience.hpp"

namespace ferro::nccl {

void* allocate(const Cudart& cuda, int device, std::size_t nbytes, Patience& patience);

// ncclMemFree takes memory away even from kernels that use it, where cudaFree waits for the whole
// device. So these two wait for what `users`, streams of the device, were given before. Unlike
// waiting for the device, that does not hang with other streams, nor break the capture of a graph. While
// a capture keeps them from finding out, which happens with the legacy default stream, it is left to the
// reaper.
void free(const Cudart& cuda, int device, void* data, const std::vector<cudaStream_t>& users,
          Patience& patience);
// Leaves it to the reaper, for callers that may be inside a group.
void free_later(const Cudart& cuda, int device, void* data, const std::vector<cudaStream_t>& users) noexcept;

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_MEMORY_HPP
