import torch

from flexcp.kernels.merge import add_sinks, merge, merge_into
from flexcp.kernels.reference import dense_attention
from flexcp.testing.tolerance import assert_close


def _halves() -> tuple[
    tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]
]:
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    both, first, last = (
        dense_attention(q, k[:, :, part], v[:, :, part])
        for part in (slice(None), slice(0, 4), slice(4, 9))
    )
    return (both.out, both.lse), (first.out, first.lse), (last.out, last.lse)


def test_two_halves_of_the_keys_merge_into_the_whole() -> None:
    (out, lse), first, last = _halves()
    merged_out, merged_lse = merge(*first, *last)
    assert_close(merged_out, out)
    assert_close(merged_lse, lse)


def test_merging_in_place_is_merging() -> None:
    _, first, last = _halves()
    out, lse = first[0].clone(), first[1].clone()
    merge_into(out, lse, *last)
    expected = merge(*first, *last)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


def test_nothing_merged_with_nothing_stays_nothing() -> None:
    nothing = torch.zeros(3, 2), torch.full((3,), -torch.inf)
    out, lse = merge(*nothing, *nothing)
    assert out.tolist() == [[0, 0]] * 3
    assert (lse == -torch.inf).all()


def test_nothing_changes_nothing() -> None:
    _, first, _ = _halves()
    nothing = torch.zeros_like(first[0]), torch.full_like(first[1], -torch.inf)
    for merged in (merge(*first, *nothing), merge(*nothing, *first)):
        assert torch.equal(merged[0], first[0])
        assert torch.equal(merged[1], first[1])


def test_a_sink_alone_gives_zero_with_its_own_logit_as_lse() -> None:
    out, lse = add_sinks(torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf), torch.ones(1))
    assert not out.any()
    assert lse.flatten().tolist() == [1, 1]
