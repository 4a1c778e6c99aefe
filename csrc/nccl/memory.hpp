// Memory that NCCL allocates so that communicators reach it best.
#ifndef FERRO_NCCL_MEMORY_HPP
#define FERRO_NCCL_MEMORY_HPP

#include <cstddef>

#include "abi/cudart_table.hpp"
#include "nccl/patience.hpp"

namespace ferro::nccl {

void* allocate(const Cudart& cuda, int device, std::size_t nbytes, Patience& patience);
void free(const Cudart& cuda, int device, void* data, Patience& patience);
// By the reaper, for whoever may be inside a group.
void free_later(const Cudart& cuda, int device, void* data) noexcept;

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_MEMORY_HPP
