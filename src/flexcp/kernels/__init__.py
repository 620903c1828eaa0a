"""Attention on one device: shapes in, a partial result and its gradients out."""

from flexcp.kernels.interface import (
    BitTile,
    Gradients,
    Partial,
    Plane,
    Shapes,
    Slab,
    causal_shapes,
    full_shapes,
)
from flexcp.kernels.merge import merge
from flexcp.kernels.prepared import Prepared, prepared_for
from flexcp.kernels.registry import KERNELS, Choice, choose, explain
from flexcp.kernels.shapes import shapes_of

__all__ = [
    "KERNELS",
    "BitTile",
    "Choice",
    "Gradients",
    "Partial",
    "Plane",
    "Prepared",
    "Shapes",
    "Slab",
    "causal_shapes",
    "choose",
    "explain",
    "full_shapes",
    "merge",
    "prepared_for",
    "shapes_of",
]
