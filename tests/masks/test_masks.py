"""Masks combine as sets, and the catalogue means what it says."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import flexcp
from flexcp import masks


def dense(mask, size, *, batch=1, heads=1):
    return create_mask(flexcp.Mask(mask).mask_mod, batch, heads, size, size, device="cpu")


def by_definition(size, allowed):
    return torch.tensor([[allowed(q, kv) for kv in range(size)] for q in range(size)])


IDS = torch.tensor([7, 7, 3, 3, 3, 9, 9, 1])


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (masks.full(), lambda q, kv: True),
        (masks.causal(), lambda q, kv: kv <= q),
        (masks.sliding_window(2), lambda q, kv: q - 2 <= kv <= q),
        (masks.sliding_window(1, 3), lambda q, kv: q - 1 <= kv <= q + 3),
        (masks.prefix_lm(3), lambda q, kv: kv <= q or kv < 3),
        (masks.document(IDS), lambda q, kv: bool(IDS[q] == IDS[kv])),
        (masks.document(lengths=[3, 0, 5]), lambda q, kv: (q < 3) == (kv < 3)),
        (masks.document(cu_seqlens=[0, 3, 3, 8]), lambda q, kv: (q < 3) == (kv < 3)),
        (masks.chunked(3), lambda q, kv: q // 3 == kv // 3),
        (masks.block_causal(3), lambda q, kv: kv // 3 <= q // 3),
        (masks.global_tokens(2), lambda q, kv: q < 2 or kv < 2),
        (
            masks.shared_prefix(2, [3, 3]),
            lambda q, kv: kv <= q and (kv < 2 or (q >= 2 and (q - 2) // 3 == (kv - 2) // 3)),
        ),
    ],
    ids=lambda x: x.name if isinstance(x, flexcp.Mask) else "",
)
def test_catalogue_masks_allow_what_they_are_defined_to(mask, allowed):
    assert torch.equal(dense(mask, 8)[0, 0], by_definition(8, allowed))


def test_prefix_and_documents_may_differ_by_batch_element():
    prefix = dense(masks.prefix_lm(torch.tensor([1, 4])), 6, batch=2)
    assert torch.equal(prefix[1, 0], by_definition(6, lambda q, kv: kv <= q or kv < 4))
    lengths = [[2, 4], [5, 1]]
    documents = dense(masks.document(lengths=lengths), 6, batch=2)
    for b, (first, _) in enumerate(lengths):
        expected = by_definition(6, lambda q, kv, first=first: (q < first) == (kv < first))
        assert torch.equal(documents[b, 0], expected)


def test_masks_combine_as_sets():
    a, b = masks.causal(), masks.chunked(3)
    da, db = dense(a, 7), dense(b, 7)
    assert torch.equal(dense(a & b, 7), da & db)
    assert torch.equal(dense(a | b, 7), da | db)
    assert torch.equal(dense(~a, 7), ~da)
    assert torch.equal(dense(~(a | ~b) & masks.full(), 7), ~(da | ~db))


def test_plain_functions_combine_with_masks_on_either_side():
    def even(b, h, q_idx, kv_idx):
        return kv_idx % 2 == 0

    both = dense(masks.causal() & even, 6)
    assert torch.equal(both, dense(even & masks.causal(), 6))
    assert torch.equal(dense(even | masks.causal(), 6), dense(masks.causal() | even, 6))
    assert both[0, 0].sum() == 3 + 3 + 2 + 2 + 1 + 1


def test_the_mask_mod_broadcasts_over_index_tensors():
    mask = masks.causal() & masks.document(torch.stack([IDS, IDS.flip(0)]))
    b, h = torch.arange(2)[:, None, None, None], torch.arange(1)[None, :, None, None]
    i = torch.arange(8)
    values = mask.mask_mod(b, h, i[:, None], i[None, :])
    assert torch.equal(values, dense(mask, 8, batch=2))


def test_a_mask_is_a_mask_mod_itself():
    i = torch.arange(4)
    zero = torch.tensor(0)
    assert torch.equal(
        masks.causal()(zero, zero, i[:, None], i), by_definition(4, lambda q, kv: kv <= q)
    )


@pytest.mark.parametrize("use", [bool, lambda m: m and m, lambda m: m or m, lambda m: not m])
def test_python_words_on_masks_are_explained(use):
    with pytest.raises(flexcp.FlexCPError, match=r"combined with `&`, `\|` and `~`.*'causal'"):
        use(masks.causal())


def test_names_show_how_a_mask_is_made():
    mask = (masks.causal() | masks.prefix_lm(5)) & ~masks.chunked(4)
    assert repr(mask) == "Mask((causal | prefix_lm(5)) & ~chunked(4))"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.sliding_window(-1), "expected left to be an integer of at least 0, got -1"),
        (lambda: masks.document("abc"), "document ids as .* got 'abc' of type str"),
        (lambda: masks.document(lengths=5), "document lengths as a 1-D or 2-D tensor"),
        (lambda: masks.prefix_lm([4, 5]), r"got \[4, 5\] of type list; .* a tensor \[B\]"),
        (lambda: masks.sliding_window(3, 1.5), "expected right to be an integer .* got 1.5"),
        (lambda: masks.chunked(0), "expected size to be an integer of at least 1, got 0"),
        (lambda: masks.prefix_lm(-2), "expected length to be an integer of at least 0, got -2"),
        (lambda: masks.prefix_lm(torch.ones(2)), "expected prefix lengths as a 1-D tensor"),
        (lambda: masks.document(), "expected either document ids or lengths, got neither"),
        (lambda: masks.document(IDS, lengths=[8]), "either document ids or lengths, got both"),
        (
            lambda: masks.document(IDS, cu_seqlens=[0, 8]),
            "cu_seqlens alone, got cu_seqlens and ids",
        ),
        (lambda: masks.document(lengths=[8], cu_seqlens=[0, 8]), "got cu_seqlens and lengths"),
        (lambda: masks.document(cu_seqlens=[1, 8]), r"start at 0 and do not fall.* got \[1, 8\]"),
        (
            lambda: masks.document(cu_seqlens=[0, 5, 3]),
            r"do not fall.* got \[0, 5, 3\]; pass",
        ),
        (lambda: masks.document(cu_seqlens=[0]), r"one entry more than documents, got \[0\]"),
        (lambda: masks.document(cu_seqlens=[0, 2.5]), "cu_seqlens as a 1-D tensor of integers"),
        (lambda: masks.document(cu_seqlens=torch.zeros(2, 2).int()), r"got torch.int32 of shape"),
        (lambda: masks.document(cu_seqlens=list(range(1, 40))), "got 39 entries from 1 to 39"),
        (lambda: masks.document(IDS.float()), "document ids as a 1-D or 2-D tensor of integers"),
        (lambda: masks.document(IDS[None, None]), r"got torch.int64 of shape \(1, 1, 8\)"),
        (lambda: masks.document(lengths=[3, -1]), r"none negative, got \[3, -1\]"),
        (lambda: masks.document(lengths=[]), "at least one document length"),
        (lambda: masks.document(lengths=[[3, 1], [5, 1]]), r"same sum .* got sums \[4, 6\]"),
        (lambda: masks.shared_prefix(-1, [3]), "expected prefix to be an integer of at least 0"),
        (lambda: flexcp.Mask(3), "expected a mask_mod: a function .* got 3 of type int"),
        (lambda: masks.causal() & 5, "expected a mask: .* got 5 of type int"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(flexcp.FlexCPError, match=message):
        make()
