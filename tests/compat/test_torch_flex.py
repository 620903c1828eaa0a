"""Torch's flex_attention asks the modes that are on, and is otherwise what it was."""

import inspect

import torch
from torch.nn.attention.flex_attention import flex_attention

from flexcp.compat._torch_flex import _entry, _takes_the_same, make_overridable
from flexcp.compat.intercept import Interception


class Seen(Interception):
    calls = 0

    def flex(self, function, *args, **kwargs):
        self.calls += 1
        return super().flex(function, *args, **kwargs)


def test_a_mode_sees_calls_and_may_let_them_run_as_they_are():
    x = torch.randn(1, 2, 8, 4)
    before, signature = flex_attention(x, x, x), inspect.signature(flex_attention)
    make_overridable()
    make_overridable()
    with Seen() as seen:
        within = flex_attention(x, x, x, scale=0.5)
    assert seen.calls == 1
    assert torch.equal(flex_attention(x, x, x), before)
    assert torch.equal(flex_attention(x, x, x, scale=0.5), within)
    assert inspect.signature(flex_attention) == signature


def test_a_function_that_takes_something_else_is_told_apart():
    def later(query, key, value, score_mod=None, *, return_aux=None):
        """As torch's may be one day."""

    assert _takes_the_same(flex_attention, _entry)
    assert not _takes_the_same(later, _entry)
