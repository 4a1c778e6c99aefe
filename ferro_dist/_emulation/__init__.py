"""The emulated GPU of `ferro_dist.testing.emulated_gpu`, and the libraries that make it.

``libnccl.so.2``, ``libcudart.so.12`` and ``libcudart.so.13`` are in this folder.
"""
