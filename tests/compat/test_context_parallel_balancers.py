"""Load balancers and switches have PyTorch's values, and values where PyTorch has none."""

import pytest
import torch
from torch.distributed.tensor.experimental import _context_parallel as theirs
from torch.nn.attention.flex_attention import create_block_mask

from flexcp import FlexCPError
from flexcp.compat import context_parallel as ours

LENGTHS = [7, 13, 100, 203, 257]


def _documents(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _packed(lengths, block_size=16, batch=None):
    ids = _documents(lengths)
    total = sum(lengths)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (ids[q] == ids[kv]) | ((b == 1) & (kv < total // 3))

    return create_block_mask(
        mask_mod, batch, None, total, total, device="cpu", BLOCK_SIZE=block_size
    )


def _undoes(balancer):
    order, back = balancer._generate_indices(), balancer._generate_indices(restore=True)
    every = torch.arange(order.shape[1]).expand(order.shape)
    return torch.equal(order.long().gather(1, back), every)


def _area_by_rank(order, allowed, ranks):
    """Allowed pairs of each rank, under a [S, S] mask."""
    return [int(allowed[part].sum()) for part in order.long().chunk(ranks)]


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (24, 3), (64, 4), (96, 8)])
@pytest.mark.parametrize("restore", [False, True])
def test_head_tail_order_is_pytorchs_to_the_type(length, ranks, restore):
    mine = ours._HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices(restore=restore)
    their = theirs._HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices(restore=restore)
    assert mine.dtype == their.dtype
    assert torch.equal(mine, their)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_head_tail_balances_causal_work_at_any_length(length, ranks):
    balancer = ours._HeadTailLoadBalancer(length, ranks, "cpu")
    assert _undoes(balancer)
    causal = torch.ones(length, length).tril()
    areas = _area_by_rank(balancer._generate_indices()[0], causal, ranks)
    parts = balancer._generate_indices()[0].chunk(ranks)
    most = max(len(part) for part in parts)
    assert max(areas) <= (most / length) * causal.sum() + length


def test_per_document_order_is_the_one_that_pytorch_documents():
    balancer = ours._PerDocumentHeadTailLoadBalancer([[4, 8, 4]], 2, "cpu")
    rank_0, rank_1 = balancer._generate_indices()[0].chunk(2)
    assert rank_0.tolist() == [0, 3, 4, 5, 10, 11, 12, 15]
    assert rank_1.tolist() == [1, 2, 6, 7, 8, 9, 13, 14]
    assert _undoes(balancer)


def test_per_document_order_gives_ranks_the_same_work_as_pytorchs_does_from_2_14_on():
    lengths = [16, 48, 32]
    ids = _documents(lengths)
    allowed = (ids[:, None] == ids).tril()
    mine = ours._PerDocumentHeadTailLoadBalancer([lengths], 4, "cpu")._generate_indices()[0]
    their = theirs._PerDocumentHeadTailLoadBalancer([lengths], 4, "cpu")._generate_indices()[0]
    assert len(set(_area_by_rank(mine, allowed, 4))) == 1
    if torch.__version__ >= "2.14":
        assert torch.equal(mine, their)
    else:
        assert len(set(_area_by_rank(their, allowed, 4))) > 1


def test_documents_may_have_any_length_and_differ_between_batch_elements():
    balancer = ours._PerDocumentHeadTailLoadBalancer([[5, 0, 8, 3], [16], [1, 1, 14]], 3, "cpu")
    order = balancer._generate_indices()
    assert order.shape == (3, 16)
    assert _undoes(balancer)
    assert order[1].tolist() != order[0].tolist()


def test_documents_of_different_totals_are_refused():
    balancer = ours._PerDocumentHeadTailLoadBalancer([[4, 4], [4]], 2, "cpu")
    with pytest.raises(FlexCPError, match=r"seq_length_per_doc .* sums \[8, 4\]"):
        balancer._generate_indices()


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("restore", [False, True])
def test_ptrr_order_is_pytorchs(batch, ranks, restore):
    mask = _packed([50, 130, 76], batch=batch)
    mine = ours._PTRRLoadBalancer(mask, ranks)._generate_indices(restore=restore)
    their = theirs._PTRRLoadBalancer(mask, ranks)._generate_indices(restore=restore)
    assert mine.dtype == their.dtype
    assert torch.equal(mine, their)


@pytest.mark.parametrize("lengths", [[50, 131, 76], [203], [3, 10]])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ptrr_takes_any_length_and_number_of_ranks(lengths, ranks):
    balancer = ours._PTRRLoadBalancer(_packed(lengths, batch=2), ranks)
    assert balancer._generate_indices().shape == (2, sum(lengths))
    assert _undoes(balancer)


def test_ptrr_scheduling_has_pytorchs_values_and_errors():
    times = torch.tensor([9, 14, 2, 20, 10, 15, 8, 14, 16, 19, 15, 3, 12, 1, 12, 10])
    mine = ours._PTRRLoadBalancer.ptrr_scheduling(times, 4)
    assert torch.equal(mine, theirs._PTRRLoadBalancer.ptrr_scheduling(times, 4))
    with pytest.raises(NotImplementedError, match="num_tasks 16 must be divisible by group_size 3"):
        ours._PTRRLoadBalancer.ptrr_scheduling(times, 3)
    with pytest.raises(AssertionError, match="1 dimension"):
        ours._PTRRLoadBalancer.ptrr_scheduling(times[None], 4)


def test_enums_have_pytorchs_members():
    for name in ("_CausalBehavior", "_RotateMethod"):
        mine = {member.name: member.value for member in getattr(ours, name)}
        assert mine == {member.name: member.value for member in getattr(theirs, name)}


def test_every_name_of_pytorch_is_there():
    assert set(theirs.__all__) <= set(ours.__all__)


@pytest.mark.parametrize("balance", [True, False])
def test_causal_behaviour_of_ring_steps_is_pytorchs(balance, monkeypatch):
    monkeypatch.setattr(theirs._cp_options, "enable_load_balance", balance)
    before = ours._cp_options.enable_load_balance
    ours._cp_options.enable_load_balance = balance
    try:
        for rank in range(4):
            for step in range(4):
                for is_causal in (True, False):
                    mine = ours._is_causal_behavior(rank, 4, step, is_causal)
                    their = theirs._is_causal_behavior(rank, 4, step, is_causal)
                    assert mine.name == their.name
    finally:
        ours._cp_options.enable_load_balance = before


def test_options_start_with_pytorchs_values():
    options = ours._cp_options
    assert (options.convert_to_f32, options.enable_load_balance) == (True, True)
    assert options.rotate_method is ours._RotateMethod.ALL_GATHER


def test_an_unknown_rotation_is_refused_as_in_pytorch():
    with pytest.raises(NotImplementedError, match="using ring for kv shards rotation"):
        ours.set_rotate_method("ring")


DOCUMENTS = [[203], [50, 153], [31, 77, 95], [5] * 10 + [153], [257], [31, 77, 149]]


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_per_document_order_balances_lengths_that_do_not_divide(lengths, ranks):
    ids = _documents(lengths)
    allowed = (ids[:, None] == ids).tril()
    balancer = ours._PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu")
    areas = _area_by_rank(balancer._generate_indices()[0], allowed, ranks)
    # Shards differ in length as torch.chunk cuts, so a rank may have one of the longest rows more.
    assert max(areas) <= sum(areas) / ranks + max(lengths)


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_ptrr_balances_blocks_that_do_not_divide(lengths, ranks):
    ids = _documents(lengths)
    allowed = (ids[:, None] == ids).tril()
    balancer = ours._PTRRLoadBalancer(_packed(lengths), ranks)
    areas = _area_by_rank(balancer._generate_indices()[0], allowed, ranks)
    assert max(areas) < 1.3 * sum(areas) / ranks


@pytest.mark.parametrize("size", [(16, 8), (8, 16)])
def test_ptrr_takes_block_sizes_that_differ_where_pytorch_does_not(size):
    mask = _packed([50, 131, 76], block_size=size)
    with pytest.raises(AssertionError, match="only support q_blk_size == kv_blk_size"):
        theirs._PTRRLoadBalancer(_packed([50, 130, 76], block_size=size), 2)._generate_indices()
    balancer = ours._PTRRLoadBalancer(mask, 3)
    assert balancer._generate_indices().shape == (1, 257)
    assert _undoes(balancer)
    ids = _documents([50, 131, 76])
    areas = _area_by_rank(balancer._generate_indices()[0], (ids[:, None] == ids).tril(), 3)
    assert max(areas) < 1.3 * sum(areas) / 3
