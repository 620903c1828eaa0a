"""Junk for every argument of every public function: refused in words, or accepted as no junk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import flexcp
from flexcp import FlexCPError, Layout, masks, testing
from flexcp.tools import report, train
from tests.junk.calls import Call, complaint, places
from tests.junk.integration_calls import integration_calls
from tests.junk.kernel_calls import attention_calls, mask_calls
from tests.junk.plan_calls import batch_calls, plan_calls
from tests.junk.samples import PLAN, X
from tests.junk.tool_calls import tool_calls

EVERY = int(os.environ.get("FLEXCP_JUNK", "31"))
"""One call of so many is made; FLEXCP_JUNK=1 makes all, some 30,000, which takes minutes."""
_HANG = 120
"""Seconds after which a call is taken for one that never ends."""

GROUPS: dict[str, Callable[[], Mapping[str, Call]]] = {
    "masks": mask_calls,
    "attention": attention_calls,
    "plans": plan_calls,
    "batches": batch_calls,
    "tools": tool_calls,
    "integrations": integration_calls,
}


@pytest.fixture
def ending(tmp_path, monkeypatch) -> Iterator[None]:
    """In a folder of its own, where a name that is taken for a file's makes no harm."""
    monkeypatch.chdir(tmp_path)

    def stop(*_: Any) -> None:
        raise TimeoutError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_junk_is_refused_in_words(group, ending, tmp_path):
    calls, found = GROUPS[group](), {}
    for one in calls.values():
        one.run("", None)  # what stands beside the junk is none itself
    for name, place, junk in list(places(calls))[::EVERY]:
        for left in tmp_path.iterdir():  # else it would be found by the next
            left.unlink()
        signal.alarm(_HANG)
        wrong = complaint(calls[name], place, junk)
        if wrong:
            found[f"{name}({place}={junk})"] = wrong
    assert found == {}


def test_every_public_name_is_called_with_junk():
    named = " ".join(name for make in GROUPS.values() for name in make())
    of_modules = [*flexcp.__all__, *masks.__all__, *report.__all__, *train.__all__]
    assert {name for name in of_modules if name not in named} == {
        "BlockKind", "FlexCPError", "masks", "testing",  # no functions
        "MaskMod", "trace_mask", "full",  # a type, tracing, and what takes nothing
        "Event", "Finished", "Strategy", "ByteTransformer", "train",  # made by a run; a run
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PLAN.positions(1.5), "a rank between 0 and 1, got 1.5"),
        (lambda: PLAN.shard(X, 2, rank=0, batch_dim="a"), "batch_dim to be an integer"),
        (lambda: PLAN.shard([1], 2, rank=0), "what is sharded to be a Tensor"),
        (
            lambda: flexcp.cross_entropy(X[0, 0], torch.zeros(8).long(), float("nan")),
            "num_scored to be an integer",
        ),
        (
            lambda: flexcp.cross_entropy(X[0, 0], torch.full((8,), 9), 8),
            "labels below the vocabulary's size 4",
        ),
        (lambda: flexcp.build_block_grid(masks.causal(), 64 << 30), "larger block_size"),
        (lambda: masks.document(lengths=[10**9]), "at most 268,435,456 tokens of documents"),
        (lambda: flexcp.make_plan(masks.causal(), 8, 10**6), "at most 16,384 ranks"),
        (lambda: flexcp.testing.simulate(print, 10**9), "at most 4,096"),
        (lambda: flexcp.testing.simulate(lambda: 1, 2), "takes other arguments: \\(\\)"),
        (lambda: flexcp.attention(X, X, X, 3), "plan to be a Plan, got 3 of type int"),
        (lambda: flexcp.flex_attention(X, X, X, masks.causal()), "passed as block_mask"),
        (lambda: flexcp.flex_attention(X, X, X, scale="2"), "scale to be a finite number"),
        (lambda: flexcp.flex_attention(X, X, X, scale=torch.tensor(True)), "scale to be a finite"),
        (lambda: flexcp.flex_attention(X, X, X, sinks=3), "sinks to be a Tensor"),
        (lambda: flexcp.flex_attention(X, X, X, score_mod=_raises), "KeyError from _raises"),
        (lambda: flexcp.shard_batch([1], PLAN), "batch to be a Mapping"),
        (lambda: flexcp.Machine.measure(seconds=1e9), "seconds to be a number from 0.001 to 60"),
        (lambda: Layout.of_rows([[1]], seq_len=1), "rows of each rank to be a Tensor"),
        (lambda: flexcp.save_plan(PLAN, "/dev/null/x"), "a file that can be written at"),
        (lambda: report.table(["a"], [[1, 2]]), "rows of 1 cells, as the header has, got 2"),
        (lambda: train.TrainConfig(schedule="rng"), "did you mean ring"),
    ],
)
def test_what_used_to_be_accepted_or_to_fail_without_a_word(call, message):
    with pytest.raises(FlexCPError, match=message):
        call()


def _raises(score, b, h, q, kv):
    raise KeyError("a fault of the user's own")


def test_junk_that_one_rank_unshards_is_an_error_on_all_of_them():
    def rank(mesh):
        plan = PLAN.on(mesh)
        x = plan.shard(X, 2)
        with pytest.raises(FlexCPError) as raised:
            plan.unshard([x] if mesh.get_rank() else x, 2)
        return str(raised.value)

    first, second = testing.simulate(rank, 2)
    assert "what is put together to be a Tensor" in first
    assert "what is put together to be a Tensor" in second


def test_messages_stay_short_whatever_they_are_about():
    with pytest.raises(FlexCPError, match=r"^.{0,600}$"):
        flexcp.make_plan("x" * 100_000, 8, 2)
    with pytest.raises(FlexCPError, match="something of type list"):
        masks.sliding_window(list(range(10_000)))
