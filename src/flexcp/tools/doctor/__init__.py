"""Whether a machine computes attention right, what is fastest on it, and what its links reach."""
