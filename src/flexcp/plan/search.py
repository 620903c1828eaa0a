"""Trying layouts and schedules, the cheapest first as far as bounds tell."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import torch

from flexcp.errors import FlexCPError
from flexcp.layout import Layout, contiguous
from flexcp.layout.balance.objective import Objective
from flexcp.plan.candidate import GAIN, Bytes, Candidate, candidate_of, is_less, modest_first
from flexcp.plan.cost import Cost
from flexcp.plan.loads import LayoutLoads, rows_in_tiles
from flexcp.plan.model_work import model_seconds
from flexcp.plan.pricing import MOST_LINES, Pricing, describe
from flexcp.plan.problem import PASSES, Problem, named_layout, split_groups
from flexcp.plan.traffic import Traffic
from flexcp.schedule import Pass, Schedule

_TUNED = Objective()
"""The numbers that layouts and schedules are chosen by."""


def search(problem: Problem, layout: str | Layout, schedule: str) -> list[Candidate]:
    """The candidates that were priced: the chosen one, then the others, cheapest first."""
    splits = _splits(problem, schedule)
    chosen = (
        layout if isinstance(layout, Layout) else named_layout(layout, problem, problem.ranks.size)
    )
    loads = LayoutLoads.of(problem, chosen, schedule)
    found: list[Candidate] = []
    relays = schedule == "auto" and not problem.flops_per_token
    for group_size, relayed in _by_bound(problem, loads, splits, found, relays=relays):
        how = "hierarchical" if relayed else schedule
        found.extend(_options(problem, loads, group_size, how, kept=relayed, found=found))
    if schedule == "auto" and layout in ("auto", "balanced"):
        _add_shared_by_groups(problem, loads, found)
    if problem.flops_per_token:
        return modest_first(sorted(found, key=lambda c: (c.price, c.seconds)))
    group_size = min(found, key=lambda c: c.price).group_size
    other_layouts = layout == "auto" and not _is_near_bound(found)
    if other_layouts and problem.ranks.size > 1 and chosen.batch_elements == 1:
        found.extend(_in_plain_order(problem, loads, splits, found, schedule))
        tried = [n for n in dict.fromkeys((group_size, 1)) if n in splits]
        less_local: list[Candidate] = []
        gains = min(c.seconds for c in found) > _TUNED.enough * min(c.if_even for c in found)
        for split in tried if gains else ():
            groups = _blocks_dealt_to_groups(problem, loads, split, found)
            if groups is not None:
                of_groups = LayoutLoads.of(problem, split_groups(groups, split), schedule, split)
                less_local.extend(
                    _options(problem, of_groups, split, schedule, few=True, found=found)
                )
        found.extend(c for c in less_local if _is_worth(c, min(found, key=lambda c: c.seconds)))
    return modest_first(sorted(found, key=lambda c: (c.price, c.seconds)))


def _is_worth(other: Candidate, fastest: Candidate) -> bool:
    """Whether giving up locality gains 2 % for each time that it moves what the fastest does."""
    gain = fastest.seconds / other.seconds - 1
    times = max(other.wire, fastest.wire) / max(fastest.wire, 1e-12)
    return gain > (_TUNED.enough - 1) * times


def _add_shared_by_groups(problem: Problem, loads: LayoutLoads, found: list[Candidate]) -> None:
    """Groups of ranks that share heads, each with as much attention and tokens as the others.

    A group has room for documents that are too long for a rank: less crosses between groups than
    if single ranks were balanced. What groups would exchange of the ranks' own layout tells within
    1 % or so what a layout of theirs will cost, unless ranks make up for attention by tokens: the
    cheapest come first, as long as that gains; of those as cheap as that, who exchange least.
    """
    if problem.ranks.size <= problem.machine.ranks_per_node and _is_near_bound(found):
        return  # nor do nodes exchange anything
    # One group of all ranks is tried before, but for the rest of the model.
    told, most = not problem.flops_per_token, problem.ranks.size
    sizes = [n for n in _group_sizes(problem) if n < most or not told]
    least = {n: _least_price(problem, loads, n, rows=False, even=True) for n in sizes}
    sizes = [n for n in sizes if _may_be_chosen(problem, least[n], n, found)]
    likely = {n: _least_price(problem, loads, n, rows=True) for n in sizes}
    near = _TUNED.even * min(likely.values(), default=0.0)

    def first(n: int) -> tuple[bool, float]:
        rows = (loads.seconds_of_rows(problem, name, n) for name in loads.needs)
        return likely[n] > near, sum(float(x.mean(1).sum()) for x in rows)

    for group_size in sorted(sizes, key=first):
        cheapest = min(found, key=lambda c: c.price)
        best, brought = cheapest.price, _bytes_received(problem, loads, group_size)
        limit = GAIN if is_less(brought, cheapest.bytes_received) else _TUNED.even
        if told and likely[group_size] > limit * best:
            continue
        if _may_be_chosen(problem, least[group_size], group_size, found):
            groups = named_layout("balanced", problem, problem.ranks.size // group_size, group_size)
            layout = split_groups(groups, group_size)
            of_groups = LayoutLoads.of(problem, layout, "auto", group_size)
            found.extend(_options(problem, of_groups, group_size, "auto", found=found))
            if min(c.price for c in found) * _TUNED.enough > best:
                return


def _may_be_chosen(
    problem: Problem, least: float, group_size: int, found: Sequence[Candidate]
) -> bool:
    """Whether ranks that share heads may be cheaper than all that was found, if work is even.

    Or hardly dearer than the cheapest, and moving less.
    """
    best = min(found, key=lambda c: c.price)
    even = _TUNED.good if problem.flops_per_token else _TUNED.level
    less = (1 + _TUNED.small) * _swaps(problem, group_size) / 2 < best.received
    limit = GAIN if is_less(_bytes_swapped(problem, group_size), best.bytes_received) else 1.0
    return least * even < best.price * max(limit, _TUNED.even if less else 1.0)


def _is_near_bound(found: Sequence[Candidate]) -> bool:
    """Whether no other candidate can be much better than the best: nobody waits, all is even."""
    best = min(found, key=lambda c: c.price)
    return best.price <= _TUNED.enough * (
        best.compute + best.beside if best.beside else best.if_even
    )


def _in_plain_order(
    problem: Problem,
    loads: LayoutLoads,
    splits: Sequence[int],
    found: Sequence[Candidate],
    schedule: str,
) -> list[Candidate]:
    """The candidates in plain order, which moves less, as under a window, and may be uneven.

    Those that are cheaper than all that was `found`, by 2 % or half as much as they are uneven.
    """
    plain = contiguous(problem.seq_len, problem.ranks.size)
    best = min(c.price for c in found)
    least = {n: _least_price(problem, loads, n, rows=False, even=True) for n in splits}
    uneven = {n: loads.imbalance(n, plain) for n in splits}
    gain = {n: max(_TUNED.enough, (1 + uneven[n]) / 2) for n in splits}
    even = [n for n in splits if least[n] * uneven[n] * gain[n] < best]
    if not even:
        return []
    of_plain = LayoutLoads.of(problem, plain, schedule)
    priced: list[Candidate] = []
    relays = schedule == "auto" and 1 in even and of_plain.share_rows(problem)
    for n, how in [*((n, schedule) for n in even), *([(1, "hierarchical")] if relays else [])]:
        relayed = how != schedule
        so_far = [*found, *priced]
        least_price = _least_price(problem, of_plain, n, rows=True, relayed=relayed)
        if least_price < min(best / gain[n], *(c.price for c in so_far)):
            priced += _options(problem, of_plain, n, how, kept=relayed, found=so_far)
    return [c for c in priced if c.price * gain[c.group_size] < best]


def _blocks_dealt_to_groups(
    problem: Problem, loads: LayoutLoads, group_size: int, found: Sequence[Candidate]
) -> Layout | None:
    """Single blocks, dealt out to groups of ranks by their work, if that may be cheaper.

    Groups receive more than under the balanced layout, but have the same to do in every round.
    """
    ranks, machine = problem.ranks.size, problem.machine
    groups = ranks // group_size
    size = -(-problem.seq_len // problem.block) * groups
    # Where all ranks need all rows, what is local matters less.
    if groups == 1 or size > MOST_LINES >> (4 if loads.asks_for(_TUNED.dense) else 6):
        return None
    best = min(c.seconds for c in found)
    same = [
        c for c in found if c.group_size == group_size and c.seconds < (1 + 2 * _TUNED.small) * best
    ]
    floor = min((c.if_even for c in same), default=best)
    if not floor:
        return None  # nothing to compute
    gain = best / floor - 1  # at most; see `_is_worth`
    if gain <= _TUNED.enough - 1:
        return None
    layout = named_layout("ptrr", problem, groups)
    if int(layout.counts.max()) * groups > _TUNED.enough * problem.seq_len:
        return None  # too few blocks
    received = rows_in_tiles(list(problem.grids.values()), layout).double()
    if group_size == 1 and loads.needs:
        least = [needs.received.double() for needs in loads.needs.values()]
        times = max(float(received.max()) / max(1.0, float(rows.max())) for rows in least)
        if gain <= (_TUNED.enough - 1) * times:
            return None
    wire = (1 - _TUNED.small) * problem.seconds_from_other_nodes(float(received.max()), group_size)
    # Rows come in forward; in backward they may be kept, but their gradients leave.
    return layout if max(2 * wire, floor + (1 - machine.hidden) * 2 * wire) < best else None


def _splits(problem: Problem, schedule: str) -> list[int]:
    """Ranks that share heads, in the candidates to try."""
    if schedule == "hybrid":
        if len(problem.ranks.shape) != 2:
            raise FlexCPError(
                "a mesh of two dimensions for the hybrid schedule",
                f"a mesh of shape {problem.ranks.shape}",
                "pass a 2-D mesh, or a shape such as (4, 2): groups, and ranks that share heads; "
                "schedule='auto' finds a split by itself",
            )
        return [problem.ranks.shape[1]]
    if schedule == "ulysses":
        return [problem.ranks.size]
    if schedule != "auto" or problem.flops_per_token:  # whose rows a rank computes must not change
        return [1]
    return [1, *_group_sizes(problem)]


def _group_sizes(problem: Problem) -> list[int]:
    """Ranks that may share heads: first splits that stay on a node, then others."""
    size, heads = problem.ranks.size, problem.shape.num_heads
    if len(problem.ranks.shape) == 2:
        return [n for n in problem.ranks.shape[1:] if n > 1]
    near = min(problem.machine.ranks_per_node, size)
    splits = [n for n in range(2, size + 1) if size % n == 0 and (n <= heads or n == size)]
    return sorted(splits, key=lambda n: (n > near, -n if n <= near else n))


def _options(
    problem: Problem,
    loads: LayoutLoads,
    group_size: int,
    schedule: str,
    *,
    few: bool = False,
    kept: bool = False,
    found: Sequence[Candidate] = (),
) -> list[Candidate]:
    """Each kind of schedule for all masks; with several masks, also the cheapest for each.

    What is hardly dearer than the cheapest that was `found` may still be chosen for another merit.
    """
    table: dict[str, dict[str, tuple[Cost, Schedule]]] = {}
    one = len(problem.grids) == 1
    limit = _TUNED.enough * min((c.price for c in found), default=math.inf) if one else math.inf
    for name in problem.grids:
        pricing = Pricing(problem, loads, name, group_size, limit)
        for cost, option in pricing.of_all(schedule, few, kept):
            row = table.setdefault(describe(option), {})
            if name not in row or cost.seconds < row[name][0].seconds:
                row[name] = (cost, option)
    complete = [row for row in table.values() if len(row) == len(problem.grids)]
    if not one and all(any(name in row for row in table.values()) for name in problem.grids):
        complete.append(
            {
                name: min((row[name] for row in table.values() if name in row), key=_seconds)
                for name in problem.grids
            }
        )
    own = model_seconds(problem, loads.layout, group_size) if problem.flops_per_token else 0.0
    moved: dict[tuple[Pass, Pass], Traffic] = {}
    return [candidate_of(problem, loads.layout, row, own, moved) for row in complete]


def _seconds(priced: tuple[Cost, Schedule]) -> float:
    return priced[0].seconds


def _by_bound(
    problem: Problem,
    loads: LayoutLoads,
    splits: Sequence[int],
    found: Sequence[Candidate],
    *,
    relays: bool,
) -> Iterator[tuple[int, bool]]:
    """How many ranks share heads: what may be cheapest first, as long as it may be cheaper.

    Where none do, also whether rows are passed on within nodes, if `relays` are tried: behind what
    fetches them straight from their owners, unless that is surely dearer. What is dearer may also
    be chosen for how little it moves.
    """
    least_of = {n: _least_price(problem, loads, n, rows=n == 1) for n in splits}
    queue = [(least, n == 1, n, False) for n, least in least_of.items()]
    if relays and 1 in splits and loads.needs and problem.machine.ranks_per_node > 1:
        least = _least_price(problem, loads, 1, rows=True, relayed=True)
        first = least * _TUNED.enough < least_of[1]
        queue.append((least if first else least_of[1], True, 1, True))
    moved = _bytes_received(problem, loads, 1)
    # What moves much has to be much cheaper than what moves less, which comes first.
    swapped = (_bytes_swapped(problem, n) for n in splits if n > 1)
    more = GAIN if any(is_less(swaps, moved) for swaps in swapped) else 1.0
    queue = [(least * (more if n == 1 else 1.0), known, n, r) for least, known, n, r in queue]
    heapq.heapify(queue)
    while queue:
        least, with_rows, group_size, relayed = heapq.heappop(queue)
        best = min(found, key=lambda c: c.price, default=None)
        if best and group_size == 1 and not is_less(best.bytes_received, moved):
            least /= more
        # Even work without a transfer bounds all splits, but not with the time of swaps in it.
        near = best and best.group_size == 1 and _is_near_bound(found)
        if best and (near or least >= best.price):
            if least > GAIN * best.price:
                return
            if relayed or not _may_bring_less(problem, loads, group_size, best, least):
                continue
        if relayed and not loads.share_rows(problem):
            continue
        if with_rows or len(splits) == 1:
            yield group_size, relayed
        else:  # what groups exchange takes a look at their rows
            least = _least_price(problem, loads, group_size, rows=True)
            heapq.heappush(queue, (least, True, group_size, False))


def _may_bring_less(
    problem: Problem, loads: LayoutLoads, group_size: int, best: Candidate, least: float
) -> bool:
    """Whether a split that is dearer than the best may be chosen for how little it moves."""
    if not is_less(_bytes_swapped(problem, group_size), best.bytes_received):
        return False
    near = group_size == 1 and least <= _TUNED.even * best.price
    if near and loads.seconds_received(problem) * (1 + _TUNED.small) < best.received:
        return True
    return is_less(_bytes_received(problem, loads, group_size), best.bytes_received)


def _bytes_received(problem: Problem, loads: LayoutLoads, group_size: int) -> Bytes:
    """What a rank receives, forward, if so many share heads, on average and at most."""
    shape, (mean, most) = problem.shape, _bytes_swapped(problem, group_size)
    row = shape.kv_bytes(-(-shape.num_kv_heads // group_size))
    row *= shape.batch if loads.layout.batch_elements == 1 else 1
    for name in loads.needs:
        received = loads.needs_of(name, group_size).received.double() * row
        mean, most = mean + float(received.mean()), most + float(received.max())
    return mean, most


def _bytes_swapped(problem: Problem, group_size: int) -> Bytes:
    """What a rank receives, forward, to swap rows for heads with others: each as much, about."""
    shape = problem.shape
    share = problem.seq_len / problem.ranks.size * shape.batch
    row = shape.q_bytes(shape.num_heads) + shape.out_bytes(shape.num_heads)
    row += shape.kv_bytes(max(shape.num_kv_heads, min(group_size, shape.num_heads)))
    found = share * (group_size - 1) / group_size * row * len(problem.grids)
    return found, found


def _least_price(
    problem: Problem,
    loads: LayoutLoads,
    group_size: int,
    *,
    rows: bool,
    even: bool = False,
    relayed: bool = False,
) -> float:
    """No candidate is cheaper in which so many ranks share heads: what each computes and moves.

    With `even`, none of any layout: all ranks compute as much. With `relayed`, none that passes
    rows on within nodes either.
    """
    shape, machine, masks = problem.shape, problem.machine, len(problem.grids)
    heads = -(-shape.num_heads // group_size) * group_size / shape.num_heads
    per_pair = (1 + machine.backward) * heads / group_size * shape.flops_per_pair / machine.flops
    pairs = torch.stack([work.before[:, -1] for work in loads.work.values()]).sum(0)
    compute = pairs.view(-1, group_size // loads.group_size).sum(1) * per_pair
    compute = compute.mean(0, keepdim=True) if even else compute
    seconds, wire = compute + 2 * masks * machine.launch, torch.zeros_like(compute)
    for name in loads.needs if rows else ():  # forward, and as gradients
        each = loads.seconds_of_rows(problem, name, group_size, relayed=relayed)
        wire = wire + 2 * each.amax(0)
    # The swaps of one head at each end are waited for, if heads are computed one by one.
    swaps = _swaps(problem, group_size) if group_size > 1 else 0.0
    ends = swaps / -(-shape.num_kv_heads // group_size)
    wire = wire + (swaps - ends)
    seconds = torch.maximum(seconds + (1 - machine.hidden) * wire, wire) + ends
    share = problem.seq_len / problem.ranks.size * shape.batch
    rest = share * problem.flops_per_token * PASSES / machine.flops
    least = float(seconds.max() + _TUNED.moved * wire.mean()) + rest
    if group_size == 1:
        return least
    latency = 4 * masks * (machine.latency + (group_size - 1) * machine.message)
    return least + _TUNED.moved * ends + latency


def _swaps(problem: Problem, group_size: int) -> float:
    """Seconds of swapping rows for heads in both passes, if so many ranks share them."""
    shape, machine = problem.shape, problem.machine
    share = problem.seq_len / problem.ranks.size * shape.batch
    # Queries and outputs, then gradients of both; K and V, then their gradients.
    row = 4 * shape.q_bytes(shape.num_heads)
    row += 2 * shape.kv_bytes(max(shape.num_kv_heads, min(group_size, shape.num_heads)))
    moved = share * (group_size - 1) / group_size * row
    near = min(group_size, machine.ranks_per_node)
    far = (group_size - near) / (group_size - 1)
    link = machine.share_of_link(group_size)
    swaps = max(moved * (1 - far) / machine.intra_bandwidth, moved * far / link)
    return swaps * len(problem.grids)
