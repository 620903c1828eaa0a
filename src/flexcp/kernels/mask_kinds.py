"""Kinds of masks, as far as it matters to which kernel is the fastest: by their slabs."""

from __future__ import annotations

from collections.abc import Iterable

from flexcp.kernels.interface import Plane, Shapes

KINDS = ("full", "causal", "documents", "window", "arbitrary")
"""In the order of what a kernel must be able to do: one rectangle, one trapezoid, several of both,
bands, single pairs."""
SCORE_FUNCTION = "score function"
"""What counts as a kind of its own: a call with a `score_mod`, whatever its mask."""

_ROWS_OF_A_SLAB = 8
"""Fewer rows to a slab than this, on average, is a mask without structure: every row has a range
of its own."""


def mask_kind(shapes: Shapes) -> str:
    """The kind of a mask: that of its most demanding plane.

    >>> from flexcp.kernels.interface import causal_shapes, full_shapes
    >>> mask_kind(causal_shapes(64)), mask_kind(full_shapes(64, 32))
    ('causal', 'full')
    """
    return most_demanding(_kind_of_plane(plane) for plane in shapes.planes)


def most_demanding(kinds: Iterable[str]) -> str:
    """The kind that stands for several: the last of them in the order of `KINDS`.

    >>> most_demanding(["causal", "window", "full"]), most_demanding([])
    ('window', 'full')
    """
    return max(kinds, key=KINDS.index, default="full")


def _kind_of_plane(plane: Plane) -> str:
    slabs = plane.slabs
    rows = sum(slab.rows for slab in slabs)
    if plane.tiles or rows < _ROWS_OF_A_SLAB * (len(slabs) - 1):
        return "arbitrary"
    if any(slab.k0_step for slab in slabs):
        return "window"
    if len(slabs) > 1:
        return "documents"
    return "full" if all(slab.is_rectangle for slab in slabs) else "causal"
