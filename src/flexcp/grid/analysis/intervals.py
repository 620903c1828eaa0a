"""Interval analysis of a mask: what can each rectangle of (query, key) pairs be?

The analysis may say "surely allowed", "surely forbidden" or "mixed in every block"; whatever it
can't decide stays open and is evaluated. A subexpression that reads only one axis is not analysed
at all: its extremes are taken from its actual values, so that any operation may occur in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flexcp.grid.analysis import ranges
from flexcp.grid.analysis.lookup import LookupTable
from flexcp.grid.analysis.ranges import Range
from flexcp.grid.analysis.rules import CHOOSES, RULES, SHARP_ALONE, RuleInputs, fits, with_nan
from flexcp.masks.graph import MaskGraph, Node


@dataclass(frozen=True, eq=False)
class Analysis:
    """A mask's graph, split into what is measured (leaves) and what is inferred (steps)."""

    graph: MaskGraph
    leaves: tuple[int, ...]
    """Nodes whose ranges the caller measures: positions, tables over one axis, plane constants."""
    steps: tuple[int, ...]
    """Nodes whose ranges follow from the leaves, in execution order."""
    unknown: frozenset[int] = frozenset()
    """Steps about which nothing can be said: unknown operations, overflow."""
    stand_ins: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Comparisons whose operands (along q, along kv) are measured as something else."""
    _lookups: dict[int, LookupTable] = field(default_factory=dict, repr=False)

    def axis_of(self, leaf: int) -> str | None:
        """The axis ("q" or "kv") that a leaf is measured along; None for a constant of b and h."""
        if leaf >= len(self.graph.nodes):
            return "q" if any(leaf == q_side for q_side, _ in self.stand_ins.values()) else "kv"
        return next(iter(self.graph.nodes[leaf].reads & {"q", "kv"}), None)

    def with_stand_ins(self, step: int) -> tuple[Analysis, tuple[int, int]]:
        """This analysis with two new leaves that an equality compares in place of its operands."""
        new = len(self.graph.nodes) + 2 * len(self.stand_ins)
        pair = (new, new + 1)
        return (
            replace(
                self,
                leaves=(*self.leaves, *pair),
                stand_ins={**self.stand_ins, step: pair},
            ),
            pair,
        )

    def output_range(self, measured: Mapping[int, Range]) -> Range:
        """What the mask can be on rectangles, given the ranges of the leaves on them."""
        known = dict(measured)
        for index in self.steps:
            known[index] = self._infer(self.graph.nodes[index], known, index)
        return known[self.graph.output]

    def _infer(self, node: Node, known: Mapping[int, Range], index: int) -> Range:
        if index in self.unknown:
            return Range.anything(node.dtype)
        if index in self.stand_ins:
            a, b = (known[side] for side in self.stand_ins[index])
            same = ranges.equal(a, b, disjoint=True)
            return same if node.name == "eq" else ranges.negation(same)
        if node.name == "index":
            table = node.args[0].node
            if table not in self._lookups:
                value = self.graph.nodes[table].value
                assert value is not None
                self._lookups[table] = LookupTable(value)
            return self._lookups[table].at([known[ref.node] for ref in node.args[1]])
        found = RULES[node.name](RuleInputs(node, self.graph, known))
        if any(known[i].may_be_nan for i in node.operands):
            return with_nan(node.name, node.dtype, found)
        return found

    def limited(self, everything: Mapping[int, Range]) -> Analysis:
        """This analysis, with steps that may overflow marked as unknown.

        `everything` are the leaves' ranges over the whole mask: a step that stays within bounds
        there does so on every part of it.
        """
        unknown = set(self.unknown)
        known = dict(everything)
        for index in self.steps:
            node = self.graph.nodes[index]
            found = self._infer(node, known, index)
            harmless = node.name in CHOOSES and node.dtype.is_floating_point
            if not found.is_truth and not harmless and not fits(found, node.dtype):
                unknown.add(index)
                found = Range.anything(node.dtype)
            known[index] = found
        return replace(self, unknown=frozenset(unknown))


def analyse(graph: MaskGraph) -> Analysis:
    """Decides which nodes are measured and which are inferred."""
    leaves: set[int] = set()
    steps: set[int] = set()
    unknown: set[int] = set()
    pending = [graph.output]
    while pending:
        index = pending.pop()
        if index in leaves or index in steps:
            continue
        node = graph.nodes[index]
        axes = node.reads & {"q", "kv"}
        if node.op is None or not axes or (len(axes) == 1 and not _is_chain(graph, index)):
            leaves.add(index)
            continue
        steps.add(index)
        if _is_understood(graph, node):
            table = {node.args[0].node} if node.name == "index" else set()
            pending.extend(set(node.operands) - table)
        else:
            unknown.add(index)
    return Analysis(graph, tuple(sorted(leaves)), tuple(sorted(steps)), frozenset(unknown))


def _is_chain(graph: MaskGraph, index: int) -> bool:
    """Whether a one-axis node is so simple that intervals lose nothing: q + 3, kv // 128 < 5."""
    node = graph.nodes[index]
    if node.op is None:
        return bool(node.reads & {"q", "kv"})
    if node.name not in SHARP_ALONE or node.compute_dtype.is_floating_point:
        return False
    moving = [i for i in node.operands if graph.nodes[i].reads & {"q", "kv"}]
    return len(moving) == 1 and _is_chain(graph, moving[0]) and graph.nodes[moving[0]].shape == ()


def _is_understood(graph: MaskGraph, node: Node) -> bool:
    if node.shape != () or any(
        graph.nodes[i].shape != () for i in node.operands if graph.nodes[i].reads
    ):
        return False
    if node.name == "index":
        table = graph.nodes[node.args[0].node]
        return (
            table.is_constant
            and 0 not in table.shape
            and not table.dtype.is_complex
            and None not in node.args[1]
            and (len(node.args[1]) == len(table.shape))
        )
    return node.name in RULES
