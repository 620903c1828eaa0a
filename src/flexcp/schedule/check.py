"""Proof, on the data alone, that a schedule computes attention and its gradients.

What is shown, for the forward and the backward pass:

- every allowed pair is computed exactly once: each group works on its own rows and on all that its
  queries need, on none of them twice, and the slices of heads are a partition;
- everything is present before it is used, and nothing is received twice;
- a round only sends what was there before the round began. Sends and receives are lines of one
  table, so each has its counterpart, and no round can wait for itself: nothing can deadlock;
- every contribution to a gradient reaches the owner of its row exactly once. Contributions are
  numbers drawn at random, moved as the schedule says, and compared as sums at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.grid import BlockGrid
from flexcp.layout import Layout, rows_needed
from flexcp.layout.row_sets import RowSets, cut, expand, row_sets, without
from flexcp.schedule.tables import Pass, Schedule, Tasks, Transfers
from flexcp.schedule.ulysses import grouped


def check_schedule(
    schedule: Schedule,
    grids: Sequence[BlockGrid],
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> None:
    """Raises FlexCPError, with rank, round and rows, if the schedule is not a correct attention.

    Args:
        schedule: What to prove.
        grids: The masks that it computes.
        num_heads: Query heads that there are; if not given, those that the slices have.
        num_kv_heads: Key-value heads that there are; if not given, those that the slices have.

    >>> import flexcp
    >>> from flexcp.layout import contiguous
    >>> from flexcp.schedule import make_schedule
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 100)
    >>> check_schedule(make_schedule("ring", [grid], contiguous(100, 3)), [grid])
    """
    _check_tokens(schedule, grids)
    _check_heads(schedule, num_heads, num_kv_heads)
    needed = rows_needed(grids, schedule.groups)
    kept = schedule.forward.moves if schedule.keeps_kv else Transfers.none()
    for name, what, present in (
        ("forward", schedule.forward, Transfers.none()),
        ("backward", schedule.backward, kept),
    ):
        _check_tables(name, what, schedule.groups)
        _check_work(name, what.work, schedule.groups, needed)
        _check_presence(name, what, schedule.groups, present)
    if len(schedule.forward.returns):
        raise _wrong("no gradients in the forward pass", "some")
    _check_gradients(schedule.backward, schedule.groups)


def _check_tokens(schedule: Schedule, grids: Sequence[BlockGrid]) -> None:
    """Layout, groups and masks are about the same tokens."""
    layout, group_size = schedule.layout, schedule.heads_group_size
    for grid in grids:
        if (grid.q_len, grid.kv_len) != (layout.seq_len, layout.seq_len):
            raise _wrong(
                f"masks of the layout's {layout.seq_len} tokens",
                f"one of {grid.q_len} x {grid.kv_len}",
            )
        if layout.batch_elements not in (1, grid.batch):
            raise _wrong(
                "one layout for all batch elements, or one for each",
                f"{layout.batch_elements} for {grid.batch} of them",
            )
    if group_size < 1 or layout.ranks % group_size:
        raise _wrong(f"groups that divide {layout.ranks} ranks", f"groups of {group_size}")
    if schedule.groups != grouped(layout, group_size):
        raise _wrong("groups that hold the rows of their ranks", "other rows in a group")


def _check_heads(schedule: Schedule, num_heads: int | None, num_kv_heads: int | None) -> None:
    """Each query head is computed once, with the kv head that it belongs to."""
    slices, parts = schedule.heads, schedule.head_parts
    if parts < 1 or (parts > 1 and schedule.heads_group_size == 1):
        raise _wrong("one part of heads, or several where ranks share them", f"{parts} parts")
    if len(slices) != schedule.heads_group_size:
        raise _wrong(f"{schedule.heads_group_size} slices of heads", f"{len(slices)}")
    if any(r.step != 1 for s in slices for r in (s.q, s.kv)):
        raise _wrong("slices of consecutive heads", "one that leaves some out")
    heads = [h for s in slices for h in s.q]
    count = len(heads) if num_heads is None else num_heads
    if heads != list(range(count)):
        raise _wrong("slices that hold each query head once", f"query heads {heads}")
    kv_count = num_kv_heads or max((s.kv.stop for s in slices), default=0)
    if not 1 <= kv_count <= count or count % kv_count:
        raise _wrong(f"kv heads of which {count} query heads are a multiple", f"{kv_count}")
    for place, own in enumerate(slices):
        used = sorted({h * kv_count // count for h in own.q})
        if list(own.kv) != used:
            raise _wrong(
                f"kv heads {used} in slice {place}, for query heads {list(own.q)}",
                f"kv heads {list(own.kv)}",
            )
        cut = [part[place] for part in schedule.heads_by_part]
        if [h for s in cut for h in s.q] != list(own.q):
            raise _wrong(f"parts that hold query heads {list(own.q)} once", f"{cut}")


def _check_tables(name: str, what: Pass, groups: Layout) -> None:
    for table in (what.moves, what.returns):
        peers = torch.cat([table.source, table.target])
        bad = (
            (table.source == table.target)
            | (table.start >= table.stop)
            | (table.round < 0)
            | (table.round >= what.rounds)
        )
        if bool(bad.any()) or bool(((peers < 0) | (peers >= groups.ranks)).any()):
            raise _wrong(
                f"{name} transfers between two groups of {groups.ranks}, in one of "
                f"{what.rounds} rounds",
                _line(table, torch.nonzero(bad)[0]) if bool(bad.any()) else "an unknown group",
            )
        outside = (table.start < 0) | (table.stop > groups.rows)
        if bool(outside.any()):
            raise _wrong(
                f"{name} transfers of rows 0 to {groups.rows - 1}",
                _line(table, torch.nonzero(outside)[0]),
            )
    work = what.work
    bad = (work.round < 0) | (work.round >= what.rounds) | (work.start >= work.stop)
    bad |= (work.rank < 0) | (work.rank >= groups.ranks)
    bad |= (work.start < 0) | (work.stop > groups.rows)
    if bool(bad.any()):
        at = int(torch.nonzero(bad)[0])
        raise _wrong(
            f"{name} work in one of {what.rounds} rounds, by one of {groups.ranks} groups, on rows "
            f"0 to {groups.rows - 1}",
            f"work in round {int(work.round[at])} by group {int(work.rank[at])} on rows "
            f"{int(work.start[at])} to {int(work.stop[at]) - 1}",
        )


def _check_work(name: str, work: Tasks, groups: Layout, needed: RowSets) -> None:
    twice = _first_overlap(work.rank, work.start, work.stop)
    if twice is not None:
        rank, row = twice
        raise _wrong(f"each pair once in {name}", f"group {rank} works on row {row} more than once")
    must = row_sets(
        torch.cat([needed.rank, groups.owned.rank]),
        torch.cat([needed.start, groups.owned.start]),
        torch.cat([needed.stop, groups.owned.stop]),
    )
    missing = without(must, row_sets(work.rank, work.start, work.stop))
    if len(missing):
        raise _wrong(
            f"each pair once in {name}",
            f"group {int(missing.rank[0])} never works on rows "
            f"{int(missing.start[0])} to {int(missing.stop[0]) - 1}",
        )


def _check_presence(name: str, what: Pass, groups: Layout, present: Transfers) -> None:
    """Work needs rows that arrived by its round; sends need rows that arrived before theirs."""
    own, moves = groups.owned, what.moves
    rank = torch.cat([own.rank, present.target, moves.target])
    start = torch.cat([own.start, present.start, moves.start])
    stop = torch.cat([own.stop, present.stop, moves.stop])
    since = torch.cat(
        [torch.full_like(own.rank, -1), torch.full_like(present.target, -1), moves.round]
    )
    twice = _first_overlap(rank, start, stop)
    if twice is not None:
        raise _wrong(
            f"each row received once in {name}",
            f"group {twice[0]} gets row {twice[1]} that it has already",
        )
    wide = groups.rows + 1
    start, order = torch.sort(rank * wide + start)
    stop, since = (rank * wide + stop)[order], since[order]
    work = what.work
    for users, begin, end, by, use in (
        (work.rank, work.start, work.stop, work.round, "uses"),
        (moves.source, moves.start, moves.stop, moves.round - 1, "sends"),
    ):
        line, piece, a, b = cut(users * wide + begin, users * wide + end, start, stop)
        covered = torch.zeros_like(users).index_add_(0, line, b - a)
        late = torch.zeros_like(users, dtype=torch.bool)
        late[line[since[piece] > by[line]]] = True
        bad = torch.nonzero((covered != end - begin) | late).squeeze(1)
        if bad.numel():
            at = int(bad[0])
            rows = f"rows {int(begin[at])} to {int(end[at]) - 1}"
            number = int(by[at]) + (use == "sends")
            raise _wrong(
                f"rows that are present before they are used in {name}",
                f"group {int(users[at])} {use} {rows} in round {number}, before all of them "
                "have arrived",
            )


def _check_gradients(what: Pass, groups: Layout) -> None:
    """Moves random numbers in place of gradients, and looks where they end up."""
    work, returns = what.work, what.returns
    owner_start, owner_stop, owner = groups.by_row
    edges = torch.unique(
        torch.cat([work.start, work.stop, returns.start, returns.stop, owner_start, owner_stop])
    )
    segments = max(0, edges.numel() - 1)
    held = torch.zeros(groups.ranks * segments, dtype=torch.int64)
    total = torch.zeros(segments, dtype=torch.int64)
    draw = torch.Generator().manual_seed(0)
    for i in range(what.rounds):
        line, segment = _segments(work, work.round == i, edges)
        drawn = torch.randint(1, 1 << 62, (line.numel(),), generator=draw)
        held.index_add_(0, work.rank[line] * segments + segment, drawn)
        total.index_add_(0, segment, drawn)
        line, segment = _segments(returns, returns.round == i, edges)
        source = returns.source[line] * segments + segment
        sent = held[source]
        if bool((sent == 0).any()):
            at = int(torch.nonzero(sent == 0)[0])
            begin, end = int(edges[segment[at]]), int(edges[segment[at] + 1]) - 1
            raise _wrong(
                "gradients to be returned by groups that have some",
                f"group {int(returns.source[line[at]])} returns gradients of rows {begin} to {end} "
                f"in round {i}, and has none",
            )
        held[source] = 0
        held.index_add_(0, returns.target[line] * segments + segment, sent)
    if segments == 0:
        return
    home = owner[torch.searchsorted(owner_stop, edges[:-1], right=True)]
    expected = torch.zeros_like(held)
    expected[home * segments + torch.arange(segments)] = total
    wrong = torch.nonzero(held != expected).squeeze(1)
    if wrong.numel():
        group, segment = divmod(int(wrong[0]), segments)
        at_owner = int(home[segment]) == group
        raise _wrong(
            "every contribution to a gradient to reach its owner once",
            f"group {group} "
            + ("misses or doubles" if at_owner else "is left with")
            + f" gradients of rows {int(edges[segment])} to {int(edges[segment + 1]) - 1}",
        )


def _segments(table: Tasks | Transfers, chosen: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Line and segment of every segment of the chosen lines."""
    lines = torch.nonzero(chosen).squeeze(1)
    first = torch.searchsorted(edges, table.start[lines])
    last = torch.searchsorted(edges, table.stop[lines])
    which, place = expand(last - first)
    return lines[which], first[which] + place


def _first_overlap(rank: Tensor, start: Tensor, stop: Tensor) -> tuple[int, int] | None:
    """A group and a row that two of its stretches share, if there is one."""
    if rank.numel() == 0:
        return None
    wide = int(stop.max()) + 1
    key, order = torch.sort(rank * wide + start)
    covered = torch.cummax((rank * wide + stop)[order], dim=0).values
    bad = torch.nonzero(key[1:] < covered[:-1]).squeeze(1)
    if bad.numel() == 0:
        return None
    return divmod(int(key[1:][bad[0]]), wide)


def _line(table: Transfers, at: Tensor) -> str:
    i = int(at)
    return (
        f"rows {int(table.start[i])} to {int(table.stop[i]) - 1} from {int(table.source[i])} to "
        f"{int(table.target[i])} in round {int(table.round[i])}"
    )


def _wrong(expected: str, got: str) -> FlexCPError:
    return FlexCPError(
        expected, got, "this schedule must not be run: make it with make_plan, or report a bug"
    )
