"""Data parallelism of torch modules; `ddp` tells what each of the others knows."""
