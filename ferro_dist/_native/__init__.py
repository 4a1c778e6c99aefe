"""The compiled modules: one for each library that they are linked to."""
