"""Objective: what makes one layout better than another, before any schedule is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Objective:
    """The price of a rank's rows, in pairs of queries and keys: the unit of work.

    The slowest rank is what a step waits for. It computes its pairs, and waits for the part of its
    transfers that compute does not hide; besides, every row that moves has a price, also where
    nobody waits for it, since the network is shared with the rest of the model.

    These are all numbers that layouts and the choice between schedules are tuned by.
    """

    pairs_per_row: float = 512.0
    """Pairs that a rank computes in the time in which it receives one row of K and V; follows from
    the machine and the shape of attention, and is not tuned."""
    pairs_per_round: float = 0.0
    """Pairs that a rank computes while the first row of others arrives, however few they are;
    follows from the machine and the shape too."""
    beside: float = 0.0
    """Pairs that a rank's tokens are worth in the rest of the model, which hide no transfers."""
    mean: float = 0.0
    """Pairs of a rank on average: one with fewer waits for others, not for more rows."""
    exposed: float = 0.4
    """What a row costs the rank that receives or sends it, over what that takes: 5 % slow compute
    down, as the cost model has it; rows of a first and of a last round are hidden in part only; and
    who receives most needs most memory. Chosen on packs with long tails, 0.1 to 0.4."""
    moved: float = 0.2
    """Price of a row that moves, over what it takes to receive it, whoever waits for it: five
    times a rank's own K and V are then worth 5 % of the time of packs of 16K tokens per rank."""
    cut: float = 0.25
    """Rows that one more stretch is worth, received. On a CPU, a gather of 4,096 rows of 4 KB takes
    0.6 us more for each run (8 % in runs of 16, under 1 % from 256 on), as copying 1.3 rows does:
    a quarter of what a row takes over a link that is a fifth as fast as a copy."""
    even: float = 1.01
    """Over the mean work, or the lowest price: what counts as equal. Ranks with more are brought
    down to `level`, unless that costs eight times what it gains (`small`); of plans and layouts
    that cost the same, one is taken that moves and keeps little."""
    enough: float = 1.02
    """Over the mean work, or the lowest price: what no rank is left with whatever moves for it, and
    how much dearer may be what is tried or taken for another merit."""
    worth: float = 3e-3
    """Gain over the mean work for which a trade is made, over the time for which heads are cut into
    more parts; price over the lower bound (the mean work, nothing received) at which the search
    stops."""
    small: float = 0.125
    """What is little of a whole: the lightest documents that fill the gaps which others leave; rows
    of a rank that are judged together, or that its count may be short of; one over it is many."""
    tries: int = 4
    """Effort: partners that the slowest rank looks at first, pairs of pieces that it looks at with
    each, and trades per rank."""
    dense: float = 0.2
    """Share of all rows from which on ranks that need as many may as well rotate everything, and
    layouts need not be local; of all work, from which on a document may be on all ranks."""

    @property
    def level(self) -> float:
        """Work over the mean that ranks with too much are brought down to: less than is left."""
        return 1.0 + (self.even - 1.0) * (1.0 - self.small)

    @property
    def good(self) -> float:
        """Price over the lower bound at which the search stops."""
        return 1.0 + self.worth

    def judged_together(self, rows: int) -> int:
        """How many rows of a rank that has so many are judged together."""
        return max(1, round(rows * self.small))

    def of_rank(self, area: Any, rows: Any, pieces: Any, larger: Any = max) -> Any:
        """The price of one rank, its pairs and rows that it waits for; or of many, as vectors."""
        wire = rows * self.pairs_per_row
        fragments = self.cut * self.pairs_per_row * pieces
        first = (rows > 0) * self.pairs_per_round
        busy = larger(larger(area, wire + self.beside) + first, self.mean)
        return busy + self.exposed * wire + fragments
