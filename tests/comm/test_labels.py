"""Messages match by labels, which are data: equal by value, with the same tag on every rank."""

import pickle

import pytest

from flexcp.comm import CallLabel, CollectiveLabel, RoundLabel
from flexcp.comm.process import tag_of


def label_of(what, mask, number):
    call = CallLabel(f"attention under mask {mask!r}" if mask else "attention", b"", 0)
    if what == "gradients":
        return call.passing("backward").round("gradients", number)
    return call.passing(what).round("rows", number)


LABELS = [
    *(
        label_of(what, mask, number)
        for what in ("forward", "backward", "gradients")
        for mask in ("", "full", "sliding")
        for number in range(40)
    ),
    *(
        CollectiveLabel(name, number, ranks, is_reason)
        for name in ("all_gather", "all_to_all", "all_reduce", "barrier", "compare")
        for number in range(1, 20)
        for ranks in ((), (0, 1), (1, 0), (0, 11))
        for is_reason in (False, True)
    ),
]


def test_different_labels_have_different_tags_and_texts():
    assert len({tag_of(label) for label in LABELS}) == len(LABELS)
    assert len({str(label) for label in LABELS}) == len(LABELS)
    assert len(set(LABELS)) == len(LABELS)


def test_tags_fit_what_transports_take_and_travel():
    for label in LABELS:
        assert 0 <= tag_of(label) < 1 << 31
        assert pickle.loads(pickle.dumps(label)) == label


def test_tags_are_the_same_in_every_process():
    """Python's own hashes of texts are not."""
    assert tag_of(label_of("forward", "sliding", 3)) == 364390646
    assert tag_of(CollectiveLabel("all_gather", 1)) == 1620923588


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (label_of("forward", "", 0), "round 0 of the forward of attention"),
        (label_of("gradients", "a", 2), "round 2 of the gradients of attention under mask 'a'"),
        (CollectiveLabel("all_reduce", 3), "all_reduce #3"),
        (CollectiveLabel("all_to_all", 1, (2, 3)), "all_to_all of ranks 2,3 #1"),
        (
            CollectiveLabel("compare", 4),
            "round 0, in which ranks compare what they are about to do, #4",
        ),
        (
            CollectiveLabel("compare", 4, is_reason=True),
            "round 0, in which ranks compare what they are about to do, #4 and why",
        ),
    ],
)
def test_errors_call_labels_by_their_text(label, text):
    assert str(label) == f"{label}" == text


def test_only_rounds_of_the_forward_pass_are_forward():
    for label in LABELS:
        is_round = isinstance(label, RoundLabel) and label.what == "rows"
        assert label.is_forward == (is_round and label.pass_.direction == "forward")
