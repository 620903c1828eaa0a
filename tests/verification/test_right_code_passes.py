"""Code that is right passes, whatever the world size, the mask and the kind of ranks."""

from __future__ import annotations

import pytest

import flexcp
from flexcp.verification import CHECKS
from verification.decoder import (
    DOCUMENTS,
    Decoder,
    make_batch,
    one_process,
    right_step,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_plain_decoder_passes_every_check_on_any_number_of_ranks(world_size):
    verdict = flexcp.verify(Decoder, world_size=world_size)
    assert verdict.passed, str(verdict)
    assert [check.name for check in verdict.checks] == list(CHECKS)
    assert {check.status for check in verdict.checks} == {"passed"}


def test_packed_documents_pass_with_one_process_written_apart():
    verdict = flexcp.verify(
        Decoder,
        make_batch(2),
        parallel=right_step,
        single=one_process,
        mask=DOCUMENTS,
        world_size=3,
    )
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)
