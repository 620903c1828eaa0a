"""Documents as training packs them: lengths drawn from a measured distribution, fitted to a pack.

``data/doc_length_distribution.csv`` counts the documents of a pre-training corpus by length. The
benchmarks draw their packs from it, so that they see its long tail: half of the documents are
shorter than 600 tokens, and a few of 100,000 hold most of the work.
"""

import csv
import random
from functools import cache
from pathlib import Path

import numpy as np

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


@cache
def published_packs(total: int, count: int) -> list[list[int]]:
    """Lengths of the documents of the first packs on which MagiAttention publishes its figures.

    Every document of the corpus has the middle length of its bin, and is cut into quarters of a
    pack if it is longer than that. All of them are shuffled and laid end to end; a pack is a
    stretch of the whole, whatever it cuts; and the packs are shuffled.

    >>> [(len(pack), max(pack)) for pack in published_packs(1 << 19, 3)]
    [(313, 32768), (336, 49152), (358, 49152)]
    """
    most = total // 4
    middles = [((low + high) // 2, number) for low, high, number in length_bins()]
    quarters = sum(length // most * number for length, number in middles)
    parts = [(most, quarters), *((n % most, number) for n, number in middles if n % most)]
    lengths, numbers = zip(*parts, strict=True)
    corpus = np.repeat(np.array(lengths, np.int32), numbers)
    draw = np.random.default_rng(42)
    draw.shuffle(corpus)
    ends = np.cumsum(corpus, dtype=np.int64)
    order = list(range(int(ends[-1]) // total))
    draw.shuffle(order)
    packs = []
    for begin in (total * place for place in order[:count]):
        first, last = np.searchsorted(ends, [begin, begin + total], side="right")
        inside = ends[first:last]
        edges = np.unique(np.concatenate([[begin], inside, [begin + total]]))
        packs.append(np.diff(edges).tolist())
    return packs
