"""Integer tensors travel in few bytes and come back as they were."""

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcp.layout import Layout
from flexcp.masks.recipe import TensorValue
from flexcp.packing import PackedTensor

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@given(st.data(), st.sampled_from(INTEGERS), st.lists(st.integers(0, 4), max_size=3))
def test_any_integers_come_back(data, dtype, shape):
    limits = torch.iinfo(dtype)
    count = torch.Size(shape).numel()
    numbers = st.lists(st.integers(limits.min, limits.max), min_size=count, max_size=count)
    x = torch.tensor(data.draw(numbers), dtype=dtype).view(shape)
    again = PackedTensor.of(x).tensor()
    assert again.dtype == x.dtype
    assert torch.equal(again, x)


def test_bools_and_tensors_without_dimensions_come_back():
    for x in (torch.tensor([True, False, True]), torch.tensor(7), torch.tensor(False)):
        again = PackedTensor.of(x).tensor()
        assert (again.dtype, again.shape, again.tolist()) == (x.dtype, x.shape, x.tolist())


def test_the_documents_of_a_million_tokens_take_a_few_kilobytes():
    ids = torch.arange(400).repeat_interleave(2621)
    assert len(pickle.dumps(TensorValue(ids))) < 10_000


def test_what_is_not_integers_on_the_cpu_travels_as_it_is():
    x = TensorValue(torch.tensor([0.5, -1.0]))
    assert pickle.loads(pickle.dumps(x)) == x


def test_what_was_derived_from_a_layout_does_not_travel():
    layout = Layout.of_runs([[(0, 500)], [(500, 1000)]])
    before = len(pickle.dumps(layout))
    assert layout.restore_index.numel() == 1000
    assert len(pickle.dumps(layout)) == before
