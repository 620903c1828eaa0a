import torch


def test_memory_that_was_never_written_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(2).new_empty(4, dtype=torch.float64).isnan().all()
