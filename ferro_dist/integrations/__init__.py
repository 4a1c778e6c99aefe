"""What needs an array library other than NumPy; nothing here is imported unless asked for."""
