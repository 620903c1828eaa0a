"""PyTorch's own APIs under their own names, so that changing one import line ports code."""
