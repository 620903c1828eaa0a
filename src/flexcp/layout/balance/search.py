"""The balanced layout: the best of a few seeds after a local search, by one objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from flexcp.grid import BlockGrid
from flexcp.layout.balance import seeds as ways
from flexcp.layout.balance.deal import Deal
from flexcp.layout.balance.documents import Documents
from flexcp.layout.balance.nodes import by_node
from flexcp.layout.balance.objective import Objective
from flexcp.layout.balance.trades import improve
from flexcp.layout.layout import Layout
from flexcp.layout.rules import even_edges, joined, require_ranks
from flexcp.layout.work import Work


def balanced(
    grids: Sequence[BlockGrid],
    ranks: int,
    *,
    pairs_per_row: float = Objective.pairs_per_row,
    pairs_per_round: float = 0.0,
    pairs_per_token: int = 0,
    token_slack: float | None = None,
    ranks_per_node: int | None = None,
) -> Layout:
    """The layout for one or several masks on which the slowest rank is fastest.

    Ranks get token counts that differ by at most a block. The work is the sum over all masks.
    Where masks differ between batch elements, each element gets a layout of its own, and token
    counts differ by at most one.

    Args:
        grids: Block grids of the masks, over the same tokens and with the same block size.
        ranks: How many ranks share the sequence.
        pairs_per_row: How many pairs a rank computes, over all heads, in the time in which it
            receives one row of K and V.
        pairs_per_round: How many it computes in the time in which the first of them arrives.
        pairs_per_token: What the rest of the model does for one token, in pairs.
        token_slack: Share of the mean by which token counts may differ from it, where the elements
            of a batch share one layout.
        ranks_per_node: Consecutive ranks that are a node: a document on several ranks stays within
            one if it fits.

    >>> import flexcp
    >>> causal = flexcp.build_block_grid(flexcp.masks.causal(), 8192)
    >>> balanced([causal], 4)
    Layout(balanced: 8192 tokens on 4 ranks, 2048 each, 7 runs)
    """
    ranks = require_ranks(ranks)
    objective = Objective(pairs_per_row=pairs_per_row, pairs_per_round=pairs_per_round)
    elements = elements_that_differ(grids)
    if elements > 1:
        works = [Work.of(grids, b, pairs_per_token=pairs_per_token) for b in range(elements)]
        return Layout.stacked([_of_work(w, ranks, objective, None, ranks_per_node) for w in works])
    work = Work.of(grids, pairs_per_token=pairs_per_token)
    slack = work.block if token_slack is None else token_slack
    return _of_work(work, ranks, objective, slack, ranks_per_node)


def elements_that_differ(grids: Sequence[BlockGrid]) -> int:
    """How many batch elements there are, or 1 if all are the same under each of the masks."""
    same = [bool((grid.planes.of == grid.planes.of[:1]).all()) for grid in grids]
    return max((1 if s else grid.batch for s, grid in zip(same, grids, strict=True)), default=1)


def _of_work(
    work: Work,
    ranks: int,
    objective: Objective,
    slack: int | float | None,
    ranks_per_node: int | None,
) -> Layout:
    """The layout for some work; counts differ by `slack` tokens, or by a share of the mean."""
    documents = Documents.of(work)
    objective = replace(objective, mean=(mean := max(documents.total / ranks, 1e-9)))
    if work.per_token:  # what is uneven is dear beside what moves for it
        beside = work.per_token * work.seq_len / ranks
        objective = replace(objective, beside=beside, even=objective.good)
    counts = even_edges(work.seq_len, ranks).diff().tolist()
    bounds, room = [(count, count) for count in counts], counts
    dense = documents.dense_rows(2 / objective.small)
    if isinstance(slack, float):
        share = work.seq_len / ranks
        room = [min(work.seq_len, max(*counts, math.floor(share * (1 + slack))))] * ranks
        bounds = [(min(*counts, math.ceil(share * (1 - slack))), room[0])] * ranks
    elif slack is not None:
        bounds = [_bounds(work, ranks, len(dense), objective)] * ranks
    deal = partial(Deal, documents, bounds=bounds, objective=objective)
    seed = partial(ways.Seed.of, documents, objective)
    many = len(documents) > 1
    over = max(documents.area(a, b) for a, b in pairwise([0, *accumulate(counts)])) / mean
    plain = seed(ways.in_order(documents, counts)) if over <= 1 + objective.small else None
    even = over <= objective.enough
    if plain and even and plain.price <= objective.good * mean:
        return _layout(plain.parts, work.seq_len)
    seeds, count = list[ways.Seed](), max(1, objective.tries**2 // ranks)
    coarse = objective.judged_together(min(room))
    for filler, level in ways.packings(documents, objective) if many else ():
        new = seed(ways.whole_documents(documents, room, objective, filler, even=level))
        # Alone, one that is to be made even later has to be clearly cheaper.
        if level or count > 1 or new.if_even * objective.enough < min(s.if_even for s in seeds):
            seeds += [new] if all(new.parts != s.parts for s in seeds) else []
        if new.if_even <= objective.good * mean:
            break
    seeds.sort(key=lambda s: s.if_even)
    chosen = seeds[:count]
    if not chosen or chosen[0].if_even > objective.enough * mean:
        chosen.append(seed(ways.two_ended(documents, counts, objective)))
        if seeds and not work.per_token:
            chosen.append(seed(ways.levelled(documents, chosen[-1].parts, coarse)))
        if many and plain and not even and plain.price < chosen[-1].price:
            chosen.append(plain)
    deals = [deal(s.parts) for s in chosen]
    best = _best_improved(deals, objective)
    if seeds[count:] and seeds[count].if_even * objective.enough < best.price():
        best = _best_improved([best, deal(seeds[count].parts)], objective)
    if dense and best.imbalance() > (objective.enough if many else objective.good):
        other = deal(ways.in_order(documents, counts, dense))
        improve(other)
        best = min(best, other, key=lambda d: (max(d.imbalance(), objective.enough), d.price()))
    if plain and even and plain.price <= best.price() * objective.good:
        return _layout(plain.parts, work.seq_len)
    parts = best.parts()
    in_order_still = best is deals[-1] and chosen[-1] is plain
    if ranks_per_node and len(set(bounds)) == 1 and not in_order_still:
        parts = [parts[rank] for rank in by_node(best, ranks_per_node)]
    return _layout(parts, work.seq_len)


def _best_improved(deals: list[Deal], objective: Objective) -> Deal:
    """The best of some deals after a local search: even enough, then cheap.

    Of those as cheap, and that move as little, the one whose rank that receives most gets least.
    """
    enough, tried = objective.enough, list[Deal]()
    most = enough * min((d.price() for d in deals if d.imbalance() <= enough), default=math.inf)
    for deal in sorted(deals, key=Deal.least_price):
        # One document is cut as evenly as its rows allow; single ones are traded if that is felt.
        uneven = (deal.imbalance() - objective.level) * deal.mean
        if len(deal.documents) > 1 or uneven > objective.worth * deal.price():
            improve(deal, most)
        tried.append(deal)
        best = min(tried, key=lambda d: (d.imbalance() > enough, d.price()))
        if best.imbalance() <= enough:
            most = min(most, enough * best.price())
        if best.price() <= objective.good * best.mean:
            break
    limits = max(enough, best.imbalance()), objective.even * best.price()
    near = [d for d in tried if d.imbalance() <= limits[0] and d.price() <= limits[1]]
    much = (1 + objective.small) * min(d.needs for d in near)
    return min((d for d in near if d.needs <= much), key=lambda d: (d.most_needed(), d.price()))


def _bounds(work: Work, ranks: int, dense: int, objective: Objective) -> tuple[int, int]:
    """The fewest and the most tokens of a rank, a block apart.

    Ranks with rows that see far more than most want fewer of them: if those ranks are few, the
    others need hardly more.
    """
    rows, block = work.seq_len, work.block
    wanting = dense if 0 < dense < ranks else -(-ranks // 2)
    even, slack = rows // ranks, int(rows // ranks * objective.small)
    fewest = -(-(rows - (ranks - wanting) * block) // ranks)
    fewest = min(max(fewest, even - slack, 0), even)
    return fewest, max(-(-rows // ranks), min(fewest + block, even + slack))


def _layout(parts: ways.Parts, seq_len: int) -> Layout:
    """The layout in which every rank keeps its rows in their order."""
    table = torch.tensor(
        [(rank, a, b) for rank, own in enumerate(parts) for a, b in sorted(p[1:] for p in own)],
        dtype=torch.int64,
    ).reshape(-1, 3)
    return joined("balanced", seq_len, len(parts), *table.unbind(1))
