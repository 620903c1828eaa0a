"""Masks of the catalogue, and sets of them, are values: they compare, hash and pickle."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import flexcp
from flexcp import masks

LENGTH = 12
NUMBER = st.integers(1, 3)
IDS = st.lists(st.integers(0, 2), min_size=LENGTH, max_size=LENGTH).map(tuple)
LEAVES = st.one_of(
    st.sampled_from([("full",), ("causal",)]),
    st.tuples(st.sampled_from(["chunked", "block_causal", "global_tokens", "prefix_lm"]), NUMBER),
    st.tuples(st.just("sliding_window"), NUMBER, NUMBER),
    st.tuples(st.just("prefix_lm of"), st.tuples(NUMBER)),
    st.tuples(st.just("document"), IDS),
    st.tuples(st.just("shared_prefix"), NUMBER, st.tuples(NUMBER, st.just(LENGTH))),
)
RECIPES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["&", "|"]), inner, inner),
        st.tuples(st.sampled_from(["~", "transposed"]), inner),
        st.tuples(st.just("shifted"), inner, NUMBER, NUMBER),
    ),
    max_leaves=4,
)


def made(recipe):
    """A new mask by a recipe."""
    kind, *rest = recipe
    match kind:
        case "&":
            return made(rest[0]) & made(rest[1])
        case "|":
            return made(rest[0]) | made(rest[1])
        case "~":
            return ~made(rest[0])
        case "transposed":
            return made(rest[0]).transposed()
        case "shifted":
            return made(rest[0]).shifted(*rest[1:])
        case "document" | "prefix_lm of":
            return getattr(masks, kind.split()[0])(torch.tensor(rest[0]))
        case _:
            return getattr(masks, kind)(*rest)


def odd(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 1


@given(RECIPES, RECIPES)
@settings(deadline=None)
def test_masks_are_equal_if_and_only_if_they_were_made_alike(one, other):
    assert made(one) == made(one)
    assert hash(made(one)) == hash(made(one))
    assert (made(one) == made(other)) is (one == other)
    assert len({made(one), made(one), made(other)}) == 1 + (one != other)


@given(RECIPES)
@settings(deadline=None, max_examples=30)
def test_a_pickled_mask_comes_back_equal_with_an_equal_grid_and_equal_attention(recipe):
    mask = made(recipe)
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert hash(again) == hash(mask)
    assert (again.name, again.nbytes) == (mask.name, mask.nbytes)
    length = LENGTH - 6  # shifts stay inside of the ids
    grids = [flexcp.build_block_grid(m, length, block_size=2) for m in (mask, again)]
    assert grids[0] == grids[1]
    q = torch.randn(1, 1, length, 4)
    assert torch.equal(*(flexcp.flex_attention(q, q, q, block_mask=m) for m in (mask, again)))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_masks_pickle_by_every_protocol(protocol):
    mask = ~(masks.causal() & masks.document(lengths=[3, 4])).shifted(1, 2)
    assert pickle.loads(pickle.dumps(mask, protocol)) == mask


def test_what_happens_to_ids_afterwards_does_not_change_a_mask():
    ids, prefixes = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 3])
    given_ids, given_prefixes = ids.clone(), prefixes.clone()
    document, prefix = masks.document(given_ids), masks.prefix_lm(given_prefixes)
    given_ids[1], given_prefixes[0] = 1, 2
    assert document == masks.document(ids) != masks.document(given_ids)
    assert prefix == masks.prefix_lm(prefixes) != masks.prefix_lm(given_prefixes)
    q = torch.tensor(1)
    assert bool(document.mask_mod(q, q, q, torch.tensor(0)))


def test_documents_are_equal_if_their_ids_are_however_they_were_given():
    ids = torch.tensor([0, 0, 1, 1, 1])
    assert masks.document(ids) == masks.document(lengths=[2, 3])
    assert masks.document(ids) == masks.document(cu_seqlens=[0, 2, 5])
    assert masks.document(ids) == masks.document(ids.int())
    assert masks.document(ids) != masks.document(ids + 1)
    assert masks.document(ids) != masks.document(ids[None])


def test_masks_on_other_devices_are_not_equal():
    ids = torch.zeros(3, dtype=torch.int64)
    assert masks.document(ids) != masks.document(ids.to("meta"))


def test_a_mask_by_another_name_is_another_mask_and_keeps_its_name():
    renamed = flexcp.Mask(masks.causal(), "mine")
    assert renamed != masks.causal()
    assert renamed == flexcp.Mask(masks.causal(), "mine")
    assert pickle.loads(pickle.dumps(renamed)).name == "mine"
    assert flexcp.Mask(masks.causal()) == masks.causal()


def test_a_mask_of_a_function_is_equal_to_itself_alone():
    own, other = flexcp.Mask(odd), flexcp.Mask(odd)
    assert own == own
    assert own != other
    assert masks.causal() & own == masks.causal() & own
    assert masks.causal() & own != masks.causal() & other
    assert masks.causal() & odd != masks.causal() & odd
    assert not (masks.causal() & own).is_value
    assert (masks.causal() & masks.full()).is_value


def test_comparing_a_mask_with_something_else_is_a_bool():
    assert (masks.causal() == torch.ones(3)) is False
    assert (masks.causal() == "causal") is False
    assert masks.causal() != odd


def test_a_mask_of_a_function_pickles_if_the_function_does():
    again = pickle.loads(pickle.dumps(masks.causal() & flexcp.Mask(odd, "odd keys")))
    assert again.name == "causal & odd keys"
    three = torch.tensor(3)
    assert bool(again.mask_mod(three, three, three, torch.tensor(1)))


def test_a_mask_whose_function_does_not_pickle_says_so(monkeypatch):
    import sys

    for module in ("cloudpickle", "dill"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    mask = masks.causal() & (lambda b, h, q_idx, kv_idx: q_idx > 3)
    with pytest.raises(flexcp.FlexCPError, match=r"function pickles.*top level of a module"):
        pickle.dumps(mask)


def test_a_copy_of_a_mask_is_the_mask():
    mask = flexcp.Mask(lambda b, h, q_idx, kv_idx: q_idx > 3)
    assert copy.deepcopy({"mask": mask})["mask"] is mask
    assert copy.copy(mask) is mask


def test_a_mask_knows_how_many_bytes_it_holds():
    table = torch.zeros(10, dtype=torch.bool)
    assert masks.causal().nbytes == 0
    assert masks.document(torch.zeros(2, 8, dtype=torch.int32)).nbytes == 2 * 8 * 8
    assert flexcp.Mask(lambda b, h, q_idx, kv_idx: table[kv_idx]).nbytes == 10
    assert (~masks.document(lengths=[4]) | masks.document(lengths=[3])).nbytes == 7 * 8


@pytest.mark.parametrize("make", [masks.causal, lambda: masks.causal() & masks.chunked(3)])
def test_the_mask_mod_of_a_value_is_a_plain_function_for_torch(make):
    mask_mod = make().mask_mod
    assert mask_mod.__code__.co_argcount == 4
    block_mask = create_block_mask(mask_mod, None, None, 128, 128, device="cpu")
    assert block_mask.shape == (1, 1, 128, 128)


def test_ids_are_read_once_however_often_masks_are_compared(monkeypatch):
    from flexcp.masks import recipe

    read = []
    tensor_bytes = recipe.tensor_bytes
    monkeypatch.setattr(recipe, "tensor_bytes", lambda x: read.append(x) or tensor_bytes(x))
    monkeypatch.setattr(torch, "equal", None)
    one, other = (masks.document(torch.tensor([0, 0, 1])) for _ in range(2))
    assert all(hash(one) == hash(other) and one == other for _ in range(5))
    assert len(read) == 2
