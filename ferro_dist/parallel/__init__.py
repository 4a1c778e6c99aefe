"""What users train with, on top of the collectives."""
