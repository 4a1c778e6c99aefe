"""Gradients that travel together, on the host and on GPUs; read `bucket` first."""
