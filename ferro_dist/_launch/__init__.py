"""The parts of ferrorun. They import each other and the standard library, nothing else."""
