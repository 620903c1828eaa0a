"""Where tokens live: layouts, the rules that make them, and the balancer."""

from flexcp.layout.balance.search import balanced
from flexcp.layout.layout import Layout
from flexcp.layout.needed_rows import rows_needed
from flexcp.layout.rules import contiguous, head_tail, per_document_head_tail, ptrr, striped
from flexcp.layout.work import area_per_rank

__all__ = [
    "Layout",
    "area_per_rank",
    "balanced",
    "contiguous",
    "head_tail",
    "per_document_head_tail",
    "ptrr",
    "rows_needed",
    "striped",
]
