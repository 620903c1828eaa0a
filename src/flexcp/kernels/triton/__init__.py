"""Attention kernels in Triton, to which a mask is data: one compilation serves every mask."""
