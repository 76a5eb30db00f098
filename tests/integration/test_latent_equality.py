"""Fact: latent attention computes the numbers of one process in every mode, with pipelines, ZeRO and context ranks."""

from __future__ import annotations

import pytest

from megatron3d.config.validate.rules import check
from tests.support.equality import FORMS, NUM_RANKS, VOCAB_SIZE, run_trace, wrong
from tests.support.latent_rows import CASES, latent_config
from tests.support.turn_ranks import run_turns


def test_every_form_has_a_row() -> None:
    assert list(dict.fromkeys(form for form, *_ in CASES)) == FORMS


@pytest.mark.parametrize("place", range(len(CASES)))
def test_latent_attention_equals_one_process(place: int) -> None:
    model, config = CASES[place][1], latent_config(place)
    assert check(config, NUM_RANKS, VOCAB_SIZE) == []
    got = [trace for trace in run_turns(run_trace, NUM_RANKS, config) if trace is not None]
    assert not (lines := wrong([(model, config)], got)), lines
