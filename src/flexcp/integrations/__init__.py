"""Models and training loops that people already have, over a sharded sequence."""
