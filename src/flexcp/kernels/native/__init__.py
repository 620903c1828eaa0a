"""Attention in C++, compiled for the processor at hand: a kernel to which the mask is data."""
