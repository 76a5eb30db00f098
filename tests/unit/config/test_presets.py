"""Fact: every preset is valid on the number of ranks that its comment states, and the comment's numbers are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron3d.config.cli import parse_args
from megatron3d.config.read import read_config
from megatron3d.config.report import batch_arithmetic
from megatron3d.config.resolve import parameter_line, run_check
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.rules import check
from megatron3d.parallel.modes import MODES, build_mode

FOLDER = Path(__file__).parents[3] / "configs"
PRESETS = sorted(FOLDER.rglob("*.yaml"))


def preset_id(path: Path) -> str:
    """Return the path of a preset relative to configs/."""
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", PRESETS, ids=preset_id)
def test_a_preset_is_valid_on_its_documented_ranks(path: Path) -> None:
    config = read_config(path).config
    comment = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    world_size = next(int(found[1]) for line in comment if (found := re.match(r"world_size (\d+) = ", line)))
    assert check(config, world_size, vocab_size=config.model.vocab_size) == []
    assert (
        run_check(parse_args(["--config", str(path), "--check", "--elsewhere", "--world-size", str(world_size)])) == 0
    )
    for line in (*batch_arithmetic(RunSpec(config, world_size)).splitlines(), parameter_line(config)):
        assert line in comment


def test_every_mode_and_form_has_a_preset() -> None:
    modes = [RunSpec(read_config(path).config).mode for path in (FOLDER / "modes").glob("*.yaml")]
    for name, entry in MODES.items():
        for form in entry.forms:
            assert any(
                build_mode(name, form, tuple(size for _, size in mode.axes)) == mode
                for mode in modes
                if mode.name == name
            ), f"no preset for mode {name}, form {form}"


def test_presets_of_published_models_have_their_published_sizes() -> None:
    published = {"gpt2-1.5b": "1,557,611,200", "llama-8b": "8,030,261,248", "llama-70b": "70,553,706,496"}
    for name, number in published.items():
        assert f"parameters {number} " in parameter_line(read_config(FOLDER / f"{name}.yaml").config)
