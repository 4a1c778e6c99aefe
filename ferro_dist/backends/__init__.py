"""Groups: the contract, and what keeps it over threads, processes and MPI."""
