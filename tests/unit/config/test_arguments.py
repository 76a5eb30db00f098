"""Fact: an option of another framework is refused with the key that it is here, and no hint leads astray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron3d.config.cli import parse_args
from megatron3d.config.read import nearest_key, read_config
from megatron3d.errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"


def names_of_others() -> list[tuple[str, frozenset[str]]]:
    """Return the options and keys of the page's first column, each with our keys of its row."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [re.findall("`([^`]+)`", cell) for cell in line.split("|")[1:3]]
        if len(cells) == 2:
            ours = frozenset(key.partition("=")[0] for key in cells[1] if re.fullmatch(r"[a-z]+\.\w+(=.*)?", key))
            theirs = [word for text in cells[0] for word in re.findall(r"--[\w-]+|^[\w.]+", text)]
            found += [(word, ours) for word in theirs if ours or word.startswith("--")]
    return found


def refusal(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--config", "configs/quickstart.yaml", *typed])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("name", "ours"), names_of_others())
def test_a_name_of_another_framework_is_refused_with_ours(
    name: str, ours: frozenset[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("--"):
        said = refusal(capsys, name, "7").partition(f"{name}: no option of this program; ")[2]
        key = said.removeprefix("use ").partition("=")[0]
        assert key in ours if ours else said.startswith("--help lists them")
    elif name != "device":  # it is detected
        section, _, key = name.rpartition(".")
        assert nearest_key(section, key) in ours


def test_the_value_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--adam-beta2", "0.95", "train.seed=1", "--lr=1e-3", "--bf16", "--model.num_layers", "3", "--chek"]
    said = refusal(capsys, *typed).splitlines()[-5:]
    assert [line.rpartition("; use ")[2] for line in said] == [
        "optimizer.adam_beta2=0.95",
        "optimizer.lr=1e-3",
        "train.precision=bf16",
        "model.num_layers=3",
        "--check",
    ]


@pytest.mark.parametrize("name", ["bits", "use_flash_attn", "jitter_noise", "max_tokens"])
def test_a_hint_has_a_word_in_common(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {{{name}: 8}}\n")
    with pytest.raises(UserError, match="unknown key; use family, num_layers, hidden_size"):
        read_config(tmp_path / "run.yaml")


def test_long_words_are_short_in_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    for word in (f"--{'x' * 100_000}", f"--world-size={'9' * 100_000}", f"--check={'x' * 100_000}"):
        assert len(refusal(capsys, word)) < 3000


def test_a_file_without_its_option_is_told_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["configs/quickstart.yaml", "--check"])
    assert "configs/quickstart.yaml: a configuration is given as --config configs/quickstart.yaml" in (
        capsys.readouterr().err
    )


def test_an_option_for_what_is_always_so_is_to_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """It was taken for a misspelt moe_router_topk."""
    assert "leave it out: routers compute in fp32" in refusal(capsys, "--moe-router-dtype", "fp32")
