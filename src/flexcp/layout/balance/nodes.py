"""Which ranks are neighbours: those that share a document go to one node."""

from __future__ import annotations

from flexcp.layout.balance.deal import Deal


def by_node(deal: Deal, ranks_per_node: int) -> list[int]:
    """The ranks in an order in which those that share a document are on one node, if they fit.

    Ranks differ in nothing but the rows that they have, so that any order is as good but for this.
    Documents of which most rows move choose first.
    """
    ranks = len(deal.shares)
    nodes: list[list[int]] = [[] for _ in range(-(-ranks // ranks_per_node))]
    room = [min(ranks_per_node, ranks - i * ranks_per_node) for i in range(len(nodes))]
    node_of: dict[int, int] = {}

    for _, document in sorted((-rows, d) for d, rows in deal.moved.items() if rows):
        needy = sorted(deal.sharers[document], key=lambda s: (-s.needed[document], s.rank))
        sharers = [share.rank for share in needy]
        new = [rank for rank in sharers if rank not in node_of]
        near = [node_of[rank] for rank in sharers if rank in node_of]
        while new:
            # Where most of its ranks are, if all others fit; else where all, or most, of them fit.
            fits = [n for n in range(len(nodes)) if room[n] >= len(new)]
            node = min(
                fits or [n for n in range(len(nodes)) if room[n]],
                key=lambda n: (-near.count(n), room[n] if fits else -room[n], n),
            )
            parts = -(-len(new) // max(room))  # as many to each: who is alone has to receive all
            count = min(-(-len(new) // parts), room[node])
            nodes[node] += new[:count]
            node_of.update(dict.fromkeys(new[:count], node))
            room[node] -= count
            new = new[count:]
    left = [rank for rank in range(ranks) if rank not in node_of]
    for own, count in zip(nodes, room, strict=True):
        own += [left.pop(0) for _ in range(count)]  # there is room for all ranks, and no more
    return [rank for node in nodes for rank in sorted(node)]
