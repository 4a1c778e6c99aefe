"""What needs an array library other than NumPy; imported only on demand."""
