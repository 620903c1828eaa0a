"""A plan has all that an executor needs: here is a small dense one, forward and backward.

It follows `Schedule.steps` on simulated ranks, moves what they say, and computes pairs densely; the
result must be that of one process.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from flexcp import masks, testing
from flexcp.comm import CallLabel
from flexcp.plan import make_plan

H, G, D = 6, 3, 4
LENGTH = 61


def label_of(direction, what, number):
    return CallLabel("attention", b"", 0).passing(direction).round(what, number)


class DenseRank:
    """One rank; buffers hold a place for every row of the sequence, which keeps this short."""

    def __init__(self, mesh, plan, bits):
        self.transport, self.rank, self.plan = mesh.transport, mesh.get_rank(), plan
        self.schedule = plan.schedule_of()
        self.group, self.place = self.schedule.group_of(self.rank)
        self.mine = self.schedule.heads[self.place]
        self.rows = self.schedule.groups.rows_of(self.group)
        kv_of = torch.tensor([self.mine.kv_of(h, H, G) for h in self.mine.q], dtype=torch.int64)
        self.kv_of, self.swaps = kv_of, 0
        self.bits = bits[self.mine.q.start : self.mine.q.stop][:, self.rows]

    def to_heads(self, x, which):
        """Own rows with all heads -> the group's rows with own heads."""
        members = self.schedule.members(self.rank)
        ranges = [getattr(s, which) for s in self.schedule.heads]
        own = ranges[self.place]
        counts = self.plan.layout.counts
        parts = [x[r.start : r.stop].contiguous() for r in ranges]
        shapes = [(len(own), int(counts[m]), D) for m in members]
        return torch.cat(self.swap_parts(parts, shapes, members), dim=1)

    def swap_parts(self, parts, shapes, members):
        """One part to each member, one of each."""
        self.swaps += 1
        takes, gives = [math.prod(s) for s in shapes], [p.numel() for p in parts]
        came = parts[0].new_empty(sum(takes))
        flat = torch.cat([p.reshape(-1) for p in parts])
        label = label_of("forward", "swap", self.swaps)
        self.transport.all_to_all(came, flat, takes, gives, members, label=label).wait()
        return [x.view(s) for x, s in zip(came.split(takes), shapes, strict=True)]

    def to_rows(self, x, which, heads):
        """The group's rows with own heads -> own rows with all heads; shared heads add up."""
        members = self.schedule.members(self.rank)
        sizes = [int(self.plan.layout.counts[m]) for m in members]
        ranges = [getattr(s, which) for s in self.schedule.heads]
        shapes = [(len(r), sizes[self.place], D) for r in ranges]
        parts = [p.contiguous() for p in x.split(sizes, dim=1)]
        came = self.swap_parts(parts, shapes, members)
        whole = torch.zeros(heads, sizes[self.place], D, dtype=x.dtype)
        for r, part in zip(ranges, came, strict=True):
            whole[r.start : r.stop] += part
        return whole

    def move(self, sends, receives, buffer, label, *, add=False):
        index = lambda rows: torch.cat([torch.arange(a, b) for a, b in rows])  # noqa: E731
        out = [(peer, buffer[:, :, index(rows)]) for peer, rows in sends]
        if add:
            for _, rows in sends:
                buffer[:, :, index(rows)] = 0
        room = [buffer.new_empty(*buffer.shape[:2], index(rows).numel(), D) for _, rows in receives]
        came = [(peer, part) for (peer, _), part in zip(receives, room, strict=True)]
        self.transport.exchange(out, came, label=label).wait()
        for (_, rows), part in zip(receives, room, strict=True):
            buffer[:, :, index(rows)] = part + (buffer[:, :, index(rows)] if add else 0)

    def scores(self, keys, kv):
        s = self.q @ kv[0][self.kv_of][:, keys].mT
        return s.masked_fill(~self.bits[:, :, keys], -torch.inf)

    def forward(self, q, k, v):
        self.q = self.to_heads(q, "q")
        kv = torch.full((2, len(self.mine.kv), LENGTH, D), torch.nan, dtype=q.dtype)
        kv[:, :, self.rows] = torch.stack([self.to_heads(x, "kv") for x in (k, v)])
        total = torch.zeros(*self.q.shape[:2], D, dtype=q.dtype)
        weight = torch.zeros(self.q.shape[:2], dtype=q.dtype)
        for i, step in enumerate(self.schedule.steps(self.rank, "forward")):
            self.move(step.sends, step.receives, kv, label_of("forward", "rows", i))
            for a, b in step.work:
                keys = torch.arange(a, b)
                p = self.scores(keys, kv).exp()
                total += p @ kv[1][self.kv_of][:, keys]
                weight += p.sum(-1)
        self.kv = kv
        self.lse = weight.log()
        self.out = torch.where(weight[..., None] > 0, total / weight[..., None], 0)
        return self.to_rows(self.out, "q", H)

    def backward(self, grad):
        grad = self.to_heads(grad, "q")
        kv = self.kv
        if not self.schedule.keeps_kv:
            rows, kv = self.rows, torch.full_like(self.kv, torch.nan)
            kv[:, :, rows] = self.kv[:, :, rows]
        delta = (grad * self.out).sum(-1, keepdim=True)
        dq, dkv = torch.zeros_like(self.q), torch.zeros_like(kv)
        for i, step in enumerate(self.schedule.steps(self.rank, "backward")):
            self.move(step.sends, step.receives, kv, label_of("backward", "rows", i))
            for a, b in step.work:
                keys = torch.arange(a, b)
                s = self.scores(keys, kv)
                p = torch.where(s > -torch.inf, (s - self.lse[..., None]).exp(), 0)
                ds = p * (grad @ kv[1][self.kv_of][:, keys].mT - delta)
                dq += ds @ kv[0][self.kv_of][:, keys]
                for h, g in enumerate(self.kv_of.tolist()):
                    dkv[0, g, keys] += ds[h].mT @ self.q[h]
                    dkv[1, g, keys] += p[h].mT @ grad[h]
            self.move(
                step.returns_out,
                step.returns_in,
                dkv,
                label_of("backward", "gradients", i),
                add=True,
            )
        dk, dv = (self.to_rows(x[:, self.rows], "kv", G) for x in dkv)
        return self.to_rows(dq, "q", H), dk, dv


def one_process(q, k, v, grad, bits):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    s = q @ k.repeat_interleave(H // G, 0).mT
    p = s.masked_fill(~bits, -torch.inf).softmax(-1).nan_to_num(0)
    out = p @ v.repeat_interleave(H // G, 0)
    return out, torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize("layout", ["auto", "head_tail"])
@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        ("exchange", 4),
        ("ring", 5),
        ("allgather", 3),
        ("ulysses", 4),
        ("ulysses", 8),
        ("hybrid", (2, 2)),
        ("hybrid", (3, 2)),
        ("auto", 6),
    ],
)
@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_outputs_and_gradients_are_those_of_one_process(schedule, shape, name, layout):
    mask = {
        "causal": masks.causal(),
        "documents": masks.document(lengths=[20, 3, 30, 8]) & masks.causal(),
        "window": masks.sliding_window(9, 2),
    }[name]
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(H, LENGTH, D, generator=generator, dtype=torch.float64) for _ in "qg")
    k, v = (torch.randn(G, LENGTH, D, generator=generator, dtype=torch.float64) for _ in "kv")
    bits = create_mask(mask.mask_mod, 1, H, LENGTH, LENGTH, device="cpu")[0].expand(H, -1, -1)
    out, grads = one_process(q, k, v, grad, bits)

    def fn(mesh):
        plan = make_plan(
            mask,
            LENGTH,
            mesh,
            schedule=schedule,
            layout=layout,
            block_size=8,
            num_heads=H,
            num_kv_heads=G,
            head_dim=D,
        )
        plan.check()
        rank = DenseRank(mesh, plan, bits)
        found = rank.forward(*(plan.shard(x, 1) for x in (q, k, v)))
        torch.testing.assert_close(plan.unshard(found, 1), out)
        for ours, theirs in zip(rank.backward(plan.shard(grad, 1)), grads, strict=True):
            torch.testing.assert_close(plan.unshard(ours, 1), theirs)

    testing.simulate(fn, shape)
