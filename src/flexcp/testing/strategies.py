"""Hypothesis strategies: masks of every shape that the analysis has to get right.

Needs the `hypothesis` package (in the `dev` extra).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from flexcp import masks
from flexcp.masks import Mask

Expression = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def document_ids(length: int, *, batch: int = 1) -> st.SearchStrategy[Tensor]:
    """int64 [length] or [batch, length]: packed documents, with ids in any order."""

    def pack(seed: int, few: int, shuffled: bool, batched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, length) if batched else (length,)
        ids = (torch.rand(shape, generator=generator) < few / max(length, 1)).long().cumsum(-1)
        names = torch.randperm(length + 1, generator=generator) if shuffled else None
        return ids if names is None else names[ids]

    return st.builds(pack, st.integers(0, 999), st.integers(0, 12), st.booleans(), st.booleans())


def catalog_masks(length: int, *, batch: int = 1) -> st.SearchStrategy[Mask]:
    """One mask from the catalogue, with parameters that fit a sequence of `length` tokens."""
    size = st.integers(1, length)
    return st.one_of(
        st.builds(masks.full),
        st.builds(masks.causal),
        st.builds(masks.sliding_window, st.integers(0, length), st.integers(0, length)),
        st.builds(masks.prefix_lm, st.integers(0, length)),
        st.lists(st.integers(0, length), min_size=batch, max_size=batch).map(
            lambda lengths: masks.prefix_lm(torch.tensor(lengths))
        ),
        document_ids(length, batch=batch).map(masks.document),
        st.builds(masks.chunked, size),
        st.builds(masks.block_causal, size),
        st.builds(masks.global_tokens, st.integers(0, length)),
        st.integers(0, length).map(
            lambda prefix: masks.shared_prefix(prefix, [length - prefix, length])
        ),
    )


def mask_trees(length: int, *, batch: int = 1, heads: int = 1) -> st.SearchStrategy[Mask]:
    """Trees of `&`, `|` and `~` over the catalogue and over plain mask_mods."""
    leaves = catalog_masks(length, batch=batch) | mask_mods(length, batch=batch, heads=heads)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda ab: ab[0] & ab[1]),
            st.tuples(inner, inner).map(lambda ab: ab[0] | ab[1]),
            inner.map(lambda a: ~a),
        ),
        max_leaves=4,
    )


def mask_mods(length: int, *, batch: int = 1, heads: int = 1) -> st.SearchStrategy[Mask]:
    """Comparisons of random expressions of the indices and of captured tensors."""
    compare = st.sampled_from([torch.ge, torch.gt, torch.le, torch.lt, torch.eq, torch.ne])

    def build(left: Expression, right: Expression, op: Any) -> Mask:
        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            result = op(left(b, h, q_idx, kv_idx), right(b, h, q_idx, kv_idx))
            assert isinstance(result, Tensor)
            return result

        return Mask(mask_mod)

    numbers = expressions(length, batch=batch, heads=heads)
    compared = st.builds(build, numbers, numbers, compare)
    return compared | lookups(length)


def lookups(length: int) -> st.SearchStrategy[Mask]:
    """Masks read from captured tensors: dense, by distance, by a table of document pairs."""

    def build(seed: int, how: int) -> Mask:
        generator = torch.Generator().manual_seed(seed)
        by_distance = torch.rand(2 * length, generator=generator) < 0.7
        rough = torch.rand(4, 4, generator=generator) < 0.5
        kinds = torch.randint(0, 4, (length,), generator=generator).sort().values
        dense = torch.rand(length, length, generator=generator) < 0.5
        order = torch.randperm(length, generator=generator)
        mods: list[Any] = [
            lambda b, h, q, kv: by_distance[q - kv],
            lambda b, h, q, kv: by_distance[q - kv + length],
            lambda b, h, q, kv: rough[kinds[q], kinds[kv]],
            lambda b, h, q, kv: rough[kinds[q]][kinds[kv]],
            lambda b, h, q, kv: dense[q, kv],
            lambda b, h, q, kv: order[q] >= order[kv],
            lambda b, h, q, kv: (rough[kinds[q]] & rough[kinds[kv]]).any(),
            lambda b, h, q, kv: order.index_select(0, q.reshape(1)).squeeze(0) > kv,
            lambda b, h, q, kv: torch.stack([q, kv]).max() > length // 2,
        ]
        return Mask(mods[how])

    return st.builds(build, st.integers(0, 999), st.integers(0, 8))


def expressions(length: int, *, batch: int = 1, heads: int = 1) -> st.SearchStrategy[Expression]:
    """Arithmetic on b, h, q and kv: integer and float, with lookups, casts and clamps."""
    small = st.integers(-length, length)

    def lookup(seed: int) -> Expression:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(-5, 2 * length, (length,), generator=generator)
        by_batch = torch.randint(0, length, (batch, length), generator=generator)
        by_head = torch.randint(0, length, (heads,), generator=generator)
        real = torch.randn(length, generator=generator)
        narrow = torch.randint(-128, 128, (length,), generator=generator).to(
            [torch.int8, torch.uint8, torch.int16, torch.int32][seed % 4]
        )
        broken = torch.where(torch.rand(length, generator=generator) < 0.1, torch.nan, real)
        choices: list[Expression] = [
            lambda b, h, q, kv: table[q],
            lambda b, h, q, kv: table[kv],
            lambda b, h, q, kv: by_batch[b, q],
            lambda b, h, q, kv: by_batch[b][kv],
            lambda b, h, q, kv: by_head[h],
            lambda b, h, q, kv: real[q],
            lambda b, h, q, kv: narrow[q],
            lambda b, h, q, kv: narrow[kv],
            lambda b, h, q, kv: narrow[q] + narrow[kv],
            lambda b, h, q, kv: broken[kv],
            lambda b, h, q, kv: torch.where(q > kv, real[q], broken[kv]),
            lambda b, h, q, kv: table[torch.minimum(q, kv)],
            lambda b, h, q, kv: table[(q - kv).abs()],
        ]
        return choices[seed % len(choices)]

    atoms: st.SearchStrategy[Expression] = st.one_of(
        st.just(lambda b, h, q, kv: q),
        st.just(lambda b, h, q, kv: kv),
        st.just(lambda b, h, q, kv: h),
        st.just(lambda b, h, q, kv: q - kv),
        small.map(lambda c: lambda b, h, q, kv: torch.full_like(q, c)),
        st.integers(0, 9999).map(lookup),
    )

    def unary(inner: Expression, kind: int, c: int) -> Expression:
        positive = abs(c) + 1
        choices: list[Callable[[Tensor], Tensor]] = [
            torch.neg,
            torch.abs,
            lambda x: x + c,
            lambda x: c - x,
            lambda x: x * (c % 7 - 3),
            lambda x: x // positive,
            lambda x: x % positive,
            lambda x: torch.clamp(x, -positive, positive),
            lambda x: torch.clamp(x, min=c),
            lambda x: x.clamp(max=c),
            lambda x: torch.where(x > c, x, -x),
            lambda x: x.to(torch.int32),
            lambda x: x.float() * 0.3,
            lambda x: (x * 0.5).floor(),
            lambda x: torch.div(x, positive, rounding_mode="trunc"),
            lambda x: x.double() / positive,
            lambda x: (x > c).int(),
            lambda x: x.long() << (positive % 3),
            lambda x: x.long() >> (positive % 3),
            lambda x: ~x.long(),
            lambda x: x.long() & positive,
            lambda x: x.long().abs() | positive,
            lambda x: x.long() ^ c,
            lambda x: torch.fmod(x.long(), positive),
            lambda x: torch.sin(x.double()),
            lambda x: x.bool(),
            lambda x: x**2,
            lambda x: x.to(torch.int16),
            lambda x: x + 3 * 2**30,
            lambda x: x.double().sqrt(),
            lambda x: torch.where(x > c, 0.0, -torch.inf),
            lambda x: x.half(),
            lambda x: torch.logical_not(x).long(),
        ]
        change = choices[kind % len(choices)]
        return lambda b, h, q, kv: _numeric(change(_numeric(inner(b, h, q, kv))))

    def binary(left: Expression, right: Expression, kind: int) -> Expression:
        choices: list[Callable[[Tensor, Tensor], Tensor]] = [
            torch.add,
            torch.sub,
            torch.mul,
            torch.minimum,
            torch.maximum,
            lambda x, y: torch.where(x > y, x, y + 1),
            lambda x, y: x // (y.abs() + 1),
            lambda x, y: x % (y.abs() + 1),
            lambda x, y: ((x > 0) & (y > 1)).long(),
            lambda x, y: ((x > 0) ^ (y > 1)).long(),
            lambda x, y: torch.logical_or(x > 2, y > 3).long(),
        ]
        combine = choices[kind % len(choices)]
        return lambda b, h, q, kv: combine(
            _numeric(left(b, h, q, kv)), _numeric(right(b, h, q, kv))
        )

    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds(unary, inner, st.integers(0, 999), small),
            st.builds(binary, inner, inner, st.integers(0, 999)),
        ),
        max_leaves=5,
    )


def _numeric(x: Tensor) -> Tensor:
    return x.long() if x.dtype == torch.bool else x
