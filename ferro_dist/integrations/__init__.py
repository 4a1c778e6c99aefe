"""What needs an array library other than NumPy; imported only on demand.

A package for each library. In it, too, ``import torch`` means the library: all imports are
absolute.
"""
