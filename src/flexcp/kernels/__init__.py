"""Attention on one device: shapes in, a partial result and its gradients out."""

from flexcp.kernels.compiled_shapes import CompiledShapes, compiled_shapes_of
from flexcp.kernels.interface import (
    BitTile,
    Kernel,
    Partial,
    PartialGradients,
    Plane,
    Shapes,
    Slab,
    causal_shapes,
    full_shapes,
)
from flexcp.kernels.merge import merge
from flexcp.kernels.registry import KERNELS, Choice, choose, explain
from flexcp.kernels.shapes import shapes_of

__all__ = [
    "KERNELS",
    "BitTile",
    "Choice",
    "CompiledShapes",
    "Kernel",
    "Partial",
    "PartialGradients",
    "Plane",
    "Shapes",
    "Slab",
    "causal_shapes",
    "choose",
    "compiled_shapes_of",
    "explain",
    "full_shapes",
    "merge",
    "shapes_of",
]
