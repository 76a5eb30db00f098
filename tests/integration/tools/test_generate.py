"""Fact: generated text depends on the checkpoint, the prompt and the seed alone, and ends with the document."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import random
import select
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from megatron3d.errors import ExitCode
from megatron3d.inference.load import restore
from megatron3d.inference.sampling import Choice, Sampler, Speculation, Text
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES, build_schedule
from megatron3d.pipeline.validate import write_schedule
from megatron3d.runtime import process
from tests.support.pool import Pool
from tests.support.processes import start
from tests.support.tiny_run import ROOT, run, write_config
from tests.support.toy_pipeline import any_schedule
from tools import generate

PROMPT = "def fill(text, width=70"
GREEDY = ["--max-new-tokens", "6", "--temperature", "0"]
SAMPLED = ["--max-new-tokens", "6", "--temperature", "1.5", "--top-k", "20", "--seed", "7"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def trained(folder: Path, *settings: str) -> Path:
    """Return a float64 run with an odd sequence length that no tensor axis divides."""
    settings = ("model.seq_length=15", "train.precision=fp64", "train.train_iters=40", *settings)
    assert run(write_config(folder), *settings).code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("generate"))


def text(folder: Path, capsys: pytest.CaptureFixture[str], typed: list[str]) -> str:
    prompt = [] if "--prompt" in typed else ["--prompt", PROMPT]
    assert generate.main(["--load", str(folder), *prompt, *typed]) == 0
    return capsys.readouterr().out


def texts(rank: int, world_size: int, folder: Path, typed: list[str], layouts: list[list[str]]) -> list[str]:
    """Return the texts that a rank would print in each layout."""
    args = generate.make_parser().parse_args(["--load", str(folder), *typed])
    checkpoint, tokenizer = generate.resolve(folder), ByteTokenizer(None)  # type: ignore[attr-defined]
    here = process.Runtime(rank, world_size, rank, torch.device("cpu"))
    found = []
    for layout in layouts:
        config = generate.read_run(checkpoint, layout, world_size)  # type: ignore[attr-defined]
        sampler = Sampler(restore(config, tokenizer, checkpoint, here), here.device)
        drafting = Speculation(sampler, Choice(args.temperature, args.top_k, args.top_p), 0)
        (said,) = generate.complete(drafting, [tokenizer.encode(PROMPT)], tokenizer, args)
        found.append(said + "\n")
    return found


@pytest.mark.parametrize(("typed", "size"), [(GREEDY, 8), (SAMPLED, 4)], ids=["greedy", "sampled"])
def test_every_layout_generates_the_same_text(
    folder: Path, pool: Pool, capsys: pytest.CaptureFixture[str], typed: list[str], size: int
) -> None:
    layouts = [
        [
            f"parallel.tensor_parallel_mode={mode}",
            f"parallel.tensor_parallel_form={form}",
            f"parallel.tensor_parallel_shape={list(entry.default_shape(size))}",
        ]
        for mode, entry in MODES.items()
        for form in entry.forms
    ]
    assert_the_same(folder, pool, capsys, typed, layouts)


def assert_the_same(
    folder: Path, pool: Pool, capsys: pytest.CaptureFixture[str], typed: list[str], layouts: list[list[str]]
) -> None:
    """Require the text of one process on each of 8 ranks."""
    alone = text(folder, capsys, typed)
    assert len(alone) > len(PROMPT) + 5
    for found in pool.run(texts, 8, folder, typed, layouts):
        assert [layout for layout, said in zip(layouts, found, strict=True) if said != alone] == []


def test_every_pipeline_generates_the_same_text(pool: Pool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Pipelines of 2 and 4 ranks run with tensor, data and context parallelism; the schedule file has three
    microbatches."""
    mine = tmp_path / "mine.csv"
    write_schedule(any_schedule(random.Random(0), [0, 1, 1, 0], 3), mine)
    files = dict.fromkeys(SCHEDULES, "null") | {FROM_FILE: str(mine)}
    layouts = []
    for place, (name, file) in enumerate(files.items()):
        ranks = 2 if file != "null" or SCHEDULES[name].min_virtual > 1 or place % 2 else 4
        mode, entry = list(MODES.items())[place % len(MODES)]
        shape = list(entry.default_shape(8 // ranks // (1 + place // 4)))
        layout = {"tensor_parallel_mode": mode, "tensor_parallel_shape": shape, "pipeline_model_parallel_size": ranks}
        layout |= {"pipeline_schedule": name, "pipeline_schedule_file": file}
        layouts.append([f"parallel.{key}={value}" for key, value in layout.items()])
    layouts.append(["parallel.context_parallel_size=4", "parallel.pipeline_model_parallel_size=2"])
    folder = trained(tmp_path, "model.num_layers=5", "model.seq_length=16")
    assert_the_same(folder, pool, capsys, GREEDY, layouts)


def test_the_seed_determines_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = (text(folder, capsys, [*SAMPLED, "--seed", seed]) for seed in ("1", "1", "2"))
    assert first == second != other
    assert text(folder, capsys, ["--max-new-tokens", "0"]) == PROMPT + "\n"


def test_several_prompts_are_continued_as_each_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Prompt n uses seed n and gives one line of JSON, typed or read from a file."""
    prompts = ["def f", "x", "return the whole of it"]
    typed = [word for prompt in prompts for word in ("--prompt", prompt)]
    load = ["--load", str(folder), *SAMPLED]
    assert generate.main([*load, *typed]) == 0
    said = capsys.readouterr().out
    alone = []
    for place, prompt in enumerate(prompts):
        assert generate.main([*load, "--prompt", prompt, "--seed", str(7 + place)]) == 0
        alone.append(capsys.readouterr().out)
    assert [json.loads(line)["text"] + "\n" for line in said.splitlines()] == alone
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    assert generate.main([*load, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    assert capsys.readouterr().out == said


def test_an_empty_line_starts_a_new_conversation(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt is appended to the conversation so far; an empty line starts a new one."""
    monkeypatch.setattr("sys.stdin", io.StringIO("def \nx = \n\ndef \n"))
    assert generate.main(["--load", str(folder), "--interactive", *GREEDY]) == 0
    talked = capsys.readouterr().out
    first = text(folder, capsys, [*GREEDY, "--prompt", "def \n"]).removeprefix("def \n")
    second = "def \n" + first.removesuffix("\n") + "x = \n"
    then = text(folder, capsys, [*GREEDY, "--prompt", second]).removeprefix(second)
    assert talked == first + then + first


def test_the_end_of_a_document_ends_the_text() -> None:
    """One of two texts ends earlier, and decoding continues with the other."""
    said = iter([(65, 70), (66, 71), (256, 72), (67, 256)])
    args = Namespace(max_new_tokens=9, seed=1, stop=[])
    next_tokens = lambda texts: [[token] for token in next(said)]  # noqa: E731
    assert generate.complete(next_tokens, [[60], [61]], ByteTokenizer(None), args) == ["<AB", "=FGH"]


class Written(io.StringIO):
    """Output that remembers each text that was written to it, and the texts that were flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def test_a_stream_prints_whole_characters_as_they_come() -> None:
    """The two bytes of é come as two tokens, and the prompt comes before the first."""
    out, when = Written(), list[str]()
    said = iter([*"é-STOP".encode()])

    def next_tokens(texts: object) -> list[list[int]]:
        when.append(out.flushed[-1])
        return [[next(said)]]

    args = Namespace(max_new_tokens=99, seed=1, stop=["STOP"])
    assert generate.complete(next_tokens, [[60]], ByteTokenizer(None), args, out) == ["<é-"]
    assert when == ["<", "<", "<é", "<é-", "<é-", "<é-", "<é-"]
    assert out.getvalue() == "<é-\n"


def test_a_stream_prints_what_is_printed_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for typed in (GREEDY, SAMPLED, [*SAMPLED, "--top-p", "0.7", "--prompt", "größe €"]):
        assert text(folder, capsys, [*typed, "--stream"]) == text(folder, capsys, typed)


def test_a_text_ends_before_a_stop_string(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The strings are several tokens long; the first one in the continuation counts, and none in the prompt."""
    sampled = [*SAMPLED[2:], "--max-new-tokens", "20"]
    whole = text(folder, capsys, sampled).removesuffix("\n").removeprefix(PROMPT)
    place = next(place for place in range(3, 15) if whole[place : place + 3] not in whole[: place + 2])
    stops = ["--stop", "never said", "--stop", whole[place : place + 3], "--stop", whole[place + 4 :]]
    for more in ([], ["--stream"]):
        assert text(folder, capsys, [*sampled, *stops, *more]) == f"{PROMPT}{whole[:place]}\n"
    assert text(folder, capsys, [*sampled, "--stop", PROMPT[:4] + "fil"]) == f"{PROMPT}{whole}\n"
    both = ["--prompt", PROMPT, "--prompt", "x"]
    assert generate.main(["--load", str(folder), *sampled, *stops, *both]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["text"] == PROMPT + whole[:place]


def test_top_p_chooses_among_the_likeliest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Down to the likeliest token alone, and 1 changes nothing."""
    assert text(folder, capsys, [*SAMPLED, "--top-p", "0"]) == text(folder, capsys, GREEDY)
    assert text(folder, capsys, [*SAMPLED, "--top-p", "1"]) == text(folder, capsys, SAMPLED)
    assert text(folder, capsys, [*SAMPLED, "--top-p", "0.3"]) != text(folder, capsys, SAMPLED)


def talked(rank: int, world_size: int, folder: Path, parallel: list[str], lines: str, presses: list[int]) -> str:
    """Return what a rank prints of a conversation; rank 0 gets Ctrl-C as before its n-th token for n in `presses`."""
    args = generate.make_parser().parse_args(
        ["--load", str(folder), "--interactive", *GREEDY[2:], "--max-new-tokens", "12"]
    )
    checkpoint, tokenizer = generate.resolve(folder), ByteTokenizer(None)  # type: ignore[attr-defined]
    here = process.Runtime(rank, world_size, rank, torch.device("cpu"))
    config = generate.read_run(checkpoint, parallel, world_size)  # type: ignore[attr-defined]
    sampler, counted = Sampler(restore(config, tokenizer, checkpoint, here), here.device), itertools.count(1)

    class Pressed(Speculation):
        def __call__(self, texts: Sequence[Text]) -> list[list[int]]:
            if next(counted) in presses and rank == 0:
                signal.raise_signal(signal.SIGINT)
            return super().__call__(texts)

    out, before = io.StringIO(), signal.getsignal(signal.SIGINT)
    shown = out if rank == 0 else None
    generate.talk(Pressed(sampler, Choice(0.0), 0), tokenizer, (), args, shown, io.StringIO(lines))
    assert signal.getsignal(signal.SIGINT) is before
    return out.getvalue()


def test_ctrl_c_ends_a_generation_on_all_ranks(folder: Path, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """The conversation goes on after what was generated; only rank 0 gets the signal, and only rank 0 prints."""
    layout = ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
    greedy = [*GREEDY, "--max-new-tokens", "12"]
    begun = text(folder, capsys, [*greedy, "--prompt", "def \n"]).removeprefix("def \n")[:3]
    context = f"def \n{begun}x\n"
    then = text(folder, capsys, [*greedy, "--prompt", context]).removeprefix(context)
    assert pool.run(talked, 4, folder, layout, "def \nx\n", [3]) == [f"{begun}\n{then}", "", "", ""]


class Typist(io.StringIO):
    """Input of a person who thinks before each line."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # as in the base class
        time.sleep(0.5)
        return super().readline()


def waited(rank: int, world_size: int, folder: Path, parallel: list[str], idle_s: float) -> tuple[str, int]:
    """Return what a rank prints of a conversation with a person, and the collectives that its watchdog has seen."""
    args = generate.make_parser().parse_args(["--load", str(folder), "--interactive", *GREEDY[2:]])
    checkpoint, tokenizer = generate.resolve(folder), ByteTokenizer(None)  # type: ignore[attr-defined]
    watchdog = mock.Mock()
    here = process.Runtime(rank, world_size, rank, torch.device("cpu"), watchdog)
    config = generate.read_run(checkpoint, parallel, world_size)  # type: ignore[attr-defined]
    sampler = Sampler(restore(config, tokenizer, checkpoint, here), here.device)
    (_, collectives), _ = watchdog.follow.call_args
    out = io.StringIO()
    with mock.patch.object(process, "IDLE_S", idle_s):
        shown = out if rank == 0 else None
        generate.talk(Speculation(sampler, Choice(0.0), 0), tokenizer, (), args, shown, Typist("def \nx\n"))
    return out.getvalue(), collectives().num_started


def test_ranks_that_wait_for_a_line_make_progress(folder: Path, pool: Pool) -> None:
    """Or the watchdog would end them while a person thinks."""
    layout = ["parallel.tensor_model_parallel_size=2"]
    undisturbed = pool.run(waited, 2, folder, layout, 600.0)
    often = pool.run(waited, 2, folder, layout, 0.05)
    assert [out for out, _ in often] == [out for out, _ in undisturbed] and len(often[0][0]) > 2
    assert all(after - before >= 5 for (_, after), (_, before) in zip(often, undisturbed, strict=True))


def test_a_conversation_goes_on_after_what_was_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop string that ended an answer is not part of it."""
    greedy = [*GREEDY, "--max-new-tokens", "12"]
    whole = text(folder, capsys, [*greedy, "--prompt", "def \n"]).removeprefix("def \n")
    stop = whole[4:6]
    first = whole[: whole.index(stop)]
    context = f"def \n{first}x\n"
    then = text(folder, capsys, [*greedy, "--stop", stop, "--prompt", context]).removeprefix(context)
    monkeypatch.setattr("sys.stdin", io.StringIO("def \nx\n"))
    assert generate.main(["--load", str(folder), "--interactive", *greedy, "--stop", stop]) == 0
    assert capsys.readouterr().out == f"{first}\n{then}"


ENDLESS = ["--temperature", "0"]


def test_a_terminal_is_asked_and_ctrl_c_and_ctrl_d_end_what_they_say(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real terminal: Ctrl-C ends a generation without end, then a line that is being typed; Ctrl-D the program."""
    said = text(folder, capsys, ["--max-new-tokens", "500", *ENDLESS, "--prompt", "def f\n"]).removeprefix("def f\n")
    assert "> " not in said and len(said) == 501, "it repeats itself, and never ends"
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "tools/generate.py",
        "--load",
        str(folder),
        "--interactive",
        *ENDLESS,
        "--max-new-tokens",
        "9999999",
    ]
    take_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(*sys.argv[1:2], sys.argv[1:])"
    )
    program = start(
        [sys.executable, "-c", take_terminal, *command],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)

    def read_to(words: str) -> str:
        said = ""
        while words not in said:
            assert select.select([ours], [], [], 120)[0], f"nothing more than {said!r}"
            said += os.read(ours, 10_000).decode(errors="replace")
        return said

    try:
        read_to("> ")
        os.write(ours, b"def f\n")
        read_to("def f\r\n")
        assert os.read(ours, 1)
        os.write(ours, b"\x03")
        read_to("\n> ")
        os.write(ours, b"half a l\x03")
        assert "Ctrl-D ends the program" in read_to("\n> ")
        os.write(ours, b"\x04")
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
        os.close(ours)


@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-20, 20), min_size=1, max_size=9, unique=True),
    top_k=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
)
def test_a_sampled_token_is_among_the_top_k(logits: list[int], top_k: int, temperature: float) -> None:
    token = Choice(temperature, top_k)(torch.tensor(logits, dtype=torch.float32), torch.Generator())
    rank = sorted(logits, reverse=True).index(logits[token])
    assert rank < (1 if temperature == 0 else top_k or len(logits))


BAD: dict[str, tuple[list[str], str]] = {
    "no such run": (["--load", "nowhere"], "nowhere: there is no such folder"),
    "no prompt": (["--prompt", ""], "--prompt '': no token"),
    "no prompts": (["--prompts", "{empty}"], "is empty; give a prompt per line"),
    "no file of prompts": (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: cannot be read as text"),
    "unknown key": (["model.hidden_sise=3"], "model.hidden_sise=3 (command line): unknown key; use model.hidden_size"),
    "another model": (["model.num_layers=3"], "saved with model.num_layers=2, but this run has 3"),
    "another tokenizer": (
        ["data.tokenizer_type=CharTokenizer", "data.tokenizer_model={chars}", "--prompt", "a"],
        "saved with tokenizer=",
    ),
    "a layout without its ranks": (["parallel.tensor_model_parallel_size=2"], "world_size 1: fewer than TP 2"),
    "a schedule that is not there": (
        [f"parallel.{key}" for key in ("pipeline_schedule=file", "pipeline_schedule_file=nowhere.csv")],
        "nowhere.csv: cannot be read",
    ),
    "a schedule for more ranks": (
        [f"parallel.{key}" for key in ("pipeline_schedule=file", "pipeline_schedule_file={two}")],
        "is for 2 ranks, not parallel.pipeline_model_parallel_size=1",
    ),
    "drafts without modules": (
        ["--num-speculative-tokens", "2"],
        "--num-speculative-tokens 2: each draft takes a module of multi-token prediction, and the model has "
        "model.mtp_num_layers=0; leave it out",
    ),
    "a stream of several texts": (
        ["--stream", "--prompt", "a", "--prompt", "b"],
        "--stream: prints one text as it comes, not 2; give one prompt, or leave it out",
    ),
    "an impossible layout": (["parallel.tensor_parallel_shape=[1,1]"], "mode 1d has 1 axes (t), not 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    typed, words = BAD[name]
    (tmp_path / "chars.json").write_text(json.dumps([chr(97 + number) for number in range(257)]))
    write_schedule(build_schedule("1f1b", 2, 3), tmp_path / "two.csv")
    (tmp_path / "empty").write_text("")
    files = {"chars": tmp_path / "chars.json", "two": tmp_path / "two.csv", "empty": tmp_path / "empty"}
    typed = [part.format(**files) for part in typed]
    code = process.run_program(lambda: generate.main(["--load", str(folder), *typed]))
    shown = capsys.readouterr()
    assert (code, shown.out) == (ExitCode.USER_ERROR, "")
    (line,) = shown.err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    "typed",
    [
        ["--temperature", "-1"],
        ["--top-k", "-1"],
        ["--max-new-tokens", "x"],
        ["--chek"],
        ["--top-p", "1.1"],
        ["--top-p", "-0.1"],
        ["--stop", ""],
    ],
)
def test_bad_options(typed: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        generate.make_parser().parse_args(["--load", "run", *typed])
    assert stopped.value.code == 2
