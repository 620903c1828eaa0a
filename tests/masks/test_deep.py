"""Sets of thousands of masks, one inside the other, work like any others."""

from __future__ import annotations

import pickle

import pytest
import torch

import flexcp
from flexcp import masks

DEPTH = 3000


def alternating(depth=DEPTH, last=4):
    mask = masks.causal()
    for i in range(depth):
        mask = mask & masks.block_causal(3) if i % 2 else mask | masks.chunked(4)
    return mask | masks.chunked(last)


def right_deep():
    mask = masks.causal()
    for i in range(DEPTH):
        mask = masks.block_causal(3) & mask if i % 2 else ~mask
    return mask


def one_operator():
    mask = masks.full()
    for _ in range(DEPTH):
        mask = mask & masks.causal()
    return mask


def shared():
    mask = masks.causal()
    for _ in range(60):
        mask = mask & mask
    return mask


@pytest.mark.parametrize("make", [alternating, right_deep, one_operator, shared])
def test_a_set_of_very_many_masks_compares_hashes_and_pickles(make):
    mask = make()
    assert mask == make()
    assert hash(mask) == hash(make())
    assert mask.is_value
    assert mask.nbytes == 0
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert again.name == mask.name
    assert len(mask.name) < 2000


def test_deep_sets_that_differ_in_one_mask_are_not_equal():
    assert alternating() != alternating(last=5)
    assert alternating() != alternating(DEPTH - 2)


@pytest.mark.parametrize("depth", [10, 63, 64, 65, 66, 400, DEPTH])
def test_a_deep_set_allows_the_pairs_that_its_masks_say(depth):
    i = torch.arange(24)
    zero, q, kv = torch.tensor(0), i[:, None], i[None, :]
    expected = q >= kv
    for n in range(depth):
        expected = expected & (q // 3 >= kv // 3) if n % 2 else expected | (q // 4 == kv // 4)
    expected = expected | (q // 5 == kv // 5)
    mask = alternating(depth, last=5)
    assert torch.equal(mask.mask_mod(zero, zero, q, kv), expected)


def test_attention_with_a_deep_set_is_that_with_an_equal_shallow_one():
    x = torch.randn(1, 2, 24, 8)
    shallow = flexcp.flex_attention(x, x, x, block_mask=masks.full() & masks.causal())
    assert torch.equal(flexcp.flex_attention(x, x, x, block_mask=one_operator()), shallow)


class Turned(flexcp.Mask):
    """A mask whose pairs its recipe does not tell."""

    def __call__(self, *indices):
        return indices[2] <= indices[3]


def test_a_mask_of_a_subclass_is_equal_to_itself_alone():
    turned = Turned(masks.causal())
    assert turned == turned
    assert turned != masks.causal()
    assert masks.causal() != turned
    assert not turned.is_value
    assert not (turned & masks.full()).is_value
    assert turned & masks.full() != masks.causal() & masks.full()
    assert type(pickle.loads(pickle.dumps(turned))) is Turned


def test_names_have_parentheses_where_a_pair_is_an_operand():
    pair = masks.causal() & masks.full()
    assert (pair | masks.full()).name == "(causal & full) | full"
    assert (flexcp.Mask(pair, "mine") | masks.full()).name == "mine | full"
    assert (flexcp.Mask(masks.full(), "R & D") | masks.full()).name == "R & D | full"
