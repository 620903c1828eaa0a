"""Messages match by labels, which are data: equal by value, with the same tag on every rank."""

import pickle

import pytest

from flexcp.comm import CallLabel

CALLS = [
    CallLabel(what, digest, number, recomputation)
    for what, digest in (("attention", b"a" * 16), ("attention", b"b" * 16), ("unshard", b"c" * 16))
    for number in range(6)
    for recomputation in range(3)
]
PASSES = [
    *(call.passing("forward") for call in CALLS),
    *(call.passing("backward", n) for call in CALLS for n in range(3)),
]
LABELS = [
    label.round(what, number)
    for label in PASSES
    for what in ("rows", "gradients", "swap")
    for number in range(20)
]


def test_different_labels_have_different_tags():
    assert len(set(LABELS)) == len(LABELS)
    # 31 bits: some of these 13,000 labels may share one, but none of one pass.
    assert len({label.tag for label in LABELS}) > 0.999 * len(LABELS)
    for one in PASSES:
        assert len({one.round(w, n).tag for w in ("rows", "swap") for n in range(500)}) == 1000


def test_tags_fit_what_transports_take_and_labels_travel():
    for label in LABELS:
        assert 0 <= label.tag < 1 << 31
        assert pickle.loads(pickle.dumps(label)) == label


def test_tags_are_the_same_in_every_process():
    """Python's own hashes of texts are not."""
    assert (
        CallLabel("attention", b"a" * 16, 3).passing("forward").round("rows", 2).tag == 1500837200
    )


def test_passes_have_one_key_on_ranks_that_are_in_different_calls():
    keys = {CallLabel(what, what.encode(), 3).passing("backward", 1).key for what in ("a", "b")}
    assert keys == {"3.0.backward.1"}
    assert len({one.key for one in PASSES}) == len(PASSES) / 3


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (
            CallLabel("attention", b"", 0).passing("forward").round("rows", 0),
            "round 0 of the forward of attention (call 0)",
        ),
        (
            CallLabel("attention under mask 'a'", b"", 7).passing("backward").round("gradients", 2),
            "round 2 of the gradients of attention under mask 'a' (call 7)",
        ),
        (
            CallLabel("attention", b"", 7, 1).passing("backward", 2).round("swap", 3),
            "all-to-all 3 of the backward of attention (call 7, recomputation 1, backward pass 2)",
        ),
    ],
)
def test_errors_call_labels_by_their_text(label, text):
    assert str(label) == f"{label}" == text
