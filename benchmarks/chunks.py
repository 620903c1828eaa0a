"""Fixed chunks of a sequence, dealt out greedily: what other planners of any mask do."""

from __future__ import annotations

import heapq

from flexcp import BlockGrid
from flexcp.layout import Layout
from flexcp.layout.work import Work


def greedy_chunks(grid: BlockGrid, ranks: int) -> Layout:
    """Fixed chunks, dearest first, each to the least loaded rank that has room."""
    blocks = Work.of([grid]).blocks
    chunk = max(1, blocks.numel() // ranks // 8)
    areas = [int(part.sum()) for part in blocks.split(chunk)]
    most = -(-len(areas) // ranks)
    loads = [(0, rank) for rank in range(ranks)]
    runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    size = chunk * grid.block_size[0]
    for i in sorted(range(len(areas)), key=lambda i: (-areas[i], i)):
        load, rank = heapq.heappop(loads)
        runs[rank].append((i * size, min((i + 1) * size, grid.q_len)))
        if len(runs[rank]) < most:
            heapq.heappush(loads, (load + areas[i], rank))
    return Layout.of_runs([sorted(own) for own in runs], seq_len=grid.q_len, name="chunks")
