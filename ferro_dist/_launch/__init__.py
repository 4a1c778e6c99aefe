"""The parts of ferrorun. `ferro_dist.launch` says what they may import."""
