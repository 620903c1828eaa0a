"""Documents as training packs them: lengths drawn from a measured distribution, fitted to a pack.

``data/doc_length_distribution.csv`` counts the documents of a pre-training corpus by length. The
benchmarks draw their packs from it, so that they see its long tail: half of the documents are
shorter than 600 tokens, and a few of 100,000 hold most of the work.
"""

import csv
import random
from pathlib import Path

_TABLE = Path(__file__).parent / "data" / "doc_length_distribution.csv"


def length_bins() -> list[tuple[int, int, int]]:
    """The table's rows: (shortest length, longest length, number of documents)."""
    bins = []
    with _TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            low, high = (int(bound) for bound in row["range"].strip("[]").split(","))
            bins.append((max(low, 1), high, int(row["number"])))
    return bins


def packed_document_lengths(total: int, seed: int) -> list[int]:
    """Lengths of the documents of one pack of ``total`` tokens; the last one is cut to fit.

    >>> lengths = packed_document_lengths(100_000, seed=0)
    >>> sum(lengths)
    100000
    >>> lengths == packed_document_lengths(100_000, seed=0)
    True
    """
    draw = random.Random(seed)
    bins = length_bins()
    weights = [number for _, _, number in bins]
    lengths: list[int] = []
    left = total
    while left > 0:
        low, high, _ = draw.choices(bins, weights)[0]
        length = min(draw.randint(low, high), left)
        lengths.append(length)
        left -= length
    return lengths
