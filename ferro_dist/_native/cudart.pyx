"""The functions of the CUDA runtime that this module is linked against.

Compiled twice: cudart12 needs libcudart.so.12, cudart13 needs libcudart.so.13. Import
neither: ``ferro_dist._native.cuda_libraries.load_cudart`` picks one.
"""

from cpython.pycapsule cimport PyCapsule_New

from ferro_dist._native.libcudart cimport Cudart

__all__ = ["functions"]

cdef Cudart table

functions = PyCapsule_New(&table, "ferro_dist.Cudart", NULL)
