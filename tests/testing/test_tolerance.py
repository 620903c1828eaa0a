import pytest
import torch

from flexcp.testing.tolerance import assert_close, relative_error, tolerance


def test_budgets_are_those_that_the_documentation_promises() -> None:
    assert tolerance(torch.float64) <= 1e-10
    assert tolerance(torch.float32) <= 2e-5


def test_a_nan_is_an_infinite_error() -> None:
    assert relative_error(torch.tensor([torch.nan]), torch.tensor([1.0])) == float("inf")


def test_infinities_have_to_agree() -> None:
    inf = torch.tensor([1.0, -torch.inf])
    assert relative_error(inf, inf) == 0
    assert relative_error(torch.tensor([1.0, torch.inf]), inf) == float("inf")
    assert relative_error(torch.tensor([1.0, 2.0]), inf) == float("inf")


def test_other_shapes_are_an_error() -> None:
    with pytest.raises(AssertionError, match="shapes differ"):
        relative_error(torch.zeros(2), torch.zeros(1))


def test_what_is_too_far_off_is_named_with_its_error_and_budget() -> None:
    with pytest.raises(AssertionError, match=r"dq is off by 0.5, more than .* for torch.float32"):
        assert_close(torch.tensor([1.5]), torch.tensor([1.0]), what="dq")
