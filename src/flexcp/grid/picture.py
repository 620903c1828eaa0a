"""A grid as a small picture: the share of each pixel that may attend, and shades as text."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import in_parts
from flexcp.grid.runs import BlockKind, Runs


def coverage(runs: Runs, height: int, width: int, row_weight: Tensor | None = None) -> Tensor:
    """float64 [<=height, <=width] Share of each pixel that is allowed; partial tiles count half.

    A pixel is 1 only if all of it is full, and 0 only if all of it is empty. `row_weight`, float64
    [rows] between 0 and 1, multiplies the share of every row of tiles.
    """
    height, width = min(height, runs.rows), min(width, runs.cols)
    weight = torch.where(runs.kind == BlockKind.FULL, 1.0, 0.5).double()
    if row_weight is not None:
        weight = weight * row_weight[runs.row]
    # Add each run's indicator to its pixel row as an integral over columns, then difference.
    edges = torch.linspace(0, runs.cols, width + 1, dtype=torch.float64)
    pixel_row = runs.row * height // runs.rows
    rows_per_pixel = torch.bincount(
        torch.arange(runs.rows) * height // runs.rows, minlength=height
    ).double()
    covered = torch.zeros(height, width + 1, dtype=torch.float64)
    step = max(1, (1 << 22) // (width + 1))
    for at in in_parts(torch.arange(len(runs)), step):
        start, stop = runs.start[at].double()[:, None], runs.stop[at].double()[:, None]
        below = torch.minimum((edges - start).clamp(min=0), stop - start) * weight[at][:, None]
        covered.index_add_(0, pixel_row[at], below)
    share = covered.diff(dim=1) / (runs.cols / width) / rows_per_pixel[:, None]
    return share.clamp(0, 1)


def as_text(share: Tensor) -> str:
    """Blocks of shade: full, mixed, nearly empty, empty.

    >>> print(as_text(torch.tensor([[1.0, 0.5, 0.0]])))
    █▒
    """
    lines = []
    for row in share.tolist():
        lines.append(
            "".join(
                "█"
                if x > 1 - 1e-9
                else " "
                if x < 1e-9
                else "▓"
                if x > 0.65
                else "▒"
                if x > 0.2
                else "░"
                for x in row
            )
        )
    return "\n".join(lines)
