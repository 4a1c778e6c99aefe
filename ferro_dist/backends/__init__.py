"""Groups of ranks: the contract (`base`), and what keeps it over threads, processes, GPUs and MPI.

Reading order: `base`; `bound`, `engine`, `simulated` and `host`, with `results`; `nccl` and
`hybrid`, with `nccl_attendance`; `mpi`, above `mpi_group`, whose parts begin with `mpi_`, too.
"""
