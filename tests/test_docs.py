"""Fact: every command on README and the documentation pages works, and every message that they explain exists.

The walk-through of getting_started.md runs first.  In copies of the folder that it leaves, with further files that the
pages mention, each page's commands run in turn.  Commands that cannot run here are in one table, with the reason, and
are read by their programs' own parsers.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron3d.viz.overviews import FLOWS
from tests.support.doc_commands import LAUNCHERS, PROGRAM, Words, code, commands, perform, understand
from tests.support.hub_models import GPT2, write_hub
from tests.support.pool import Pool
from tests.support.tiny_run import ROOT
from tests.test_architecture import SOURCES, imported_modules
from tools import train_tokenizer

WALK = ROOT / "docs" / "getting_started.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CLUSTER = "of a cluster: tests/integration/test_slurm.py starts one and submits the like"
HUB = "asks a hub for questions: tests/unit/inference/test_scoring.py scores without one"
IMAGE = "makes an image of a container from others, which come from a registry"
GPU = "needs GPUs: tests/integration/test_gpu_presets.py runs presets dry"
# The first words of a command that cannot run here, and why.
NOT_DONE: Mapping[str, str] = {
    "bash scripts/quickstart.sh": "installs, and trains for minutes; the walk has its programs",
    "bash scripts/test.sh": "installs, and runs these tests",
    "bash scripts/mutations.sh": "runs the tests of equality once per seeded bug",
    "bash scripts/fuzz.sh": "reads 20,000 damaged files of each format; tests/integration/test_fuzz.py reads 500",
    "bash scripts/soak.sh": "starts a thousand runs, for hours",
    "bash scripts/docs.sh": "installs; tests/integration/test_site.py builds the site",
    "pip install": "installs",
    "docker build": IMAGE,
    "enroot import": IMAGE,
    "apptainer build": IMAGE,
    "python tools/lm_harness.py": HUB,
    "torchrun --nproc-per-node 8 tools/lm_harness.py": HUB,
    "python tools/calibrate.py": "keeps every core busy for a minute: tests/unit/tools/test_calibrate_cpu.py",
    "torchrun --nproc-per-node 8 pretrain_gpt.py --config configs/gpus/": GPU,
    "python benchmarks/gpu_day.py": GPU,
    "python tools/serve.py": "serves until Ctrl-C: tests/integration/tools/test_serve.py starts some",
    "torchrun --nproc-per-node 2 tools/serve.py": "serves until Ctrl-C: tests/integration/tools/test_serve.py",
    "sbatch": CLUSTER,
    "srun": CLUSTER,
    "scancel": CLUSTER,
    "bash scripts/slurm/": CLUSTER,
    "touch runs/mine/stop": "stops a run that is under way: tests/integration/test_resume.py",
}
REPOSITORY_FILE = r"\b(?:megatron3d|tests|tools|benchmarks|docs|scripts|configs)/[\w./-]+\.(?:py|md|yaml|sh|sbatch)\b"
ELSEWHERE = {"docs/performance.md"}  # of torchtitan
# Most files of each way of docs/architecture.md; `RunSpec` is beside the last one.
MOST_FILES: Mapping[str, int] = {
    "From the batch to the loss": 12,
    "From the gradient to the optimizer": 8,
    "From queries and keys to context ranks and back": 8,
    "From tools/plan.py to its table": 12,
}
KINDS_OF_ENTRIES = (
    "A model family",
    "A layer option",
    "A tensor-parallel mode",
    "A pipeline schedule",
    "An optimizer",
    "A recipe of the GEMM",
    "A context exchange",
    "An expert dispatcher",
    "A router",
)
# What files of a way import of one another only through these: an interface, and a package's own names.
THROUGH = ("megatron3d.comm.interface", "megatron3d.zero")
# Exit codes other than 0: the two runs differ.
CODES: Mapping[str, int] = {"python tools/checkpoint.py diff": 1}


def reason(words: Words) -> str | None:
    """Return why a command cannot run here, or None."""
    return next((why for begun, why in NOT_DONE.items() if shlex.join(words).startswith(begun)), None)


def do(words: Words, pool: Pool) -> None:
    """Run a command, which must succeed."""
    outcome, typed = perform(words, pool), shlex.join(words)
    expected = next((number for begun, number in CODES.items() if typed.startswith(begun)), 0)
    assert outcome.code == expected, f"{typed}\n{outcome.out}\n{outcome.err}"


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Iterator[Path]:
    """Return the folder left by the walk-through, with the other files that pages mention."""
    folder, back = tmp_path_factory.mktemp("docs"), Path.cwd()
    for name in ("configs", "scripts", "tools"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    try:
        (path, text), *more = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", WALK.read_text(encoding="utf-8"), re.M | re.S)
        assert not more
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text(text)
        for words in commands(WALK):
            if reason(words) is None:
                do(words, pool)
        with mock.patch.object(train_tokenizer, "train_in_child", train_tokenizer.train):
            furnish(pool)
    finally:
        os.chdir(back)
    yield folder


def furnish(pool: Pool) -> None:
    """Write texts, tokenizers, token files, runs and a Hugging Face model under the names that the pages use."""
    run = "python pretrain_gpt.py --config runs/first/first.yaml checkpoint.save_interval=10"
    documents = [json.loads(line)["text"] for line in Path("runs/first/corpus.jsonl").read_text().splitlines()]
    text = "\n".join(documents[:5])
    for folder in ("data/gpt2", "runs/quickstart", "web"):
        Path(folder).mkdir(parents=True)
    for name in ("input.txt", "web/a.txt"):
        Path(name).write_text(text)
    values = {"model.vocab_size": 8192, "train.precision": "bf16"}
    Path("rows.jsonl").write_text(json.dumps({"config": values, "cluster": "eos", "num_gpus": 1, "measured_s": 1}))
    Path("prompts.txt").write_text("def \nclass\n")
    Path("web/b.jsonl").write_text(json.dumps({"text": text}) + "\n")
    Path("news-1.jsonl.zst").write_bytes(pa.compress(Path("web/b.jsonl").read_bytes(), "zstd", asbytes=True))
    pq.write_table(pa.table({"text": [text]}), "books.parquet")
    write_hub(Path("gpt2"), {**GPT2, "vocab_size": 400})
    shutil.copytree(ROOT / "tests" / "unit" / "convert" / "data" / "megatron", "megatron")
    learn, prepare = (f"python tools/{tool}.py --input input.txt" for tool in ("train_tokenizer", "preprocess_data"))
    for command in (
        f"{run} checkpoint.save=runs/one checkpoint.load=runs/one checkpoint.keep_best=true train.eval_interval=10",
        f"{run} checkpoint.save=runs/other checkpoint.load=runs/other train.seed=2",
        f"{prepare} --output-prefix data/other --tokenizer-type CharTokenizer "
        "--tokenizer-model runs/first/tokenizer.json",
        f"{learn} --vocab-size 400 --output-prefix runs/quickstart/tokenizer",
        f"{prepare} --output-prefix runs/quickstart/corpus --tokenizer-model runs/quickstart/tokenizer.model",
        f"{learn} --vocab-size 400 --type byte-bpe --output-prefix data/web",
        f"{prepare} --output-prefix data/gpt2/corpus --tokenizer-type HuggingFaceTokenizer "
        "--tokenizer-model data/web.tokenizer.json",
    ):
        do(shlex.split(command), pool)
    for folder in ("data/gpt2", "gpt2"):
        shutil.copy("data/web.tokenizer.json", f"{folder}/tokenizer.json")


def test_the_walk_through_the_documents_leaves_a_run(walked: Path) -> None:
    assert (walked / "runs/first/run/latest_checkpointed_iteration.txt").read_text() == "40\n"
    assert (walked / "runs/first/curves.png").is_file()


def test_the_recording_is_of_the_commands_of_the_walk() -> None:
    (recorded,) = re.findall(r"^```text\n(.*?)^```", WALK.read_text(encoding="utf-8"), re.M | re.S)
    typed = [shlex.split(line.removeprefix("$ ")) for line in recorded.splitlines() if line.startswith("$ ")]
    assert typed == [words for words in commands(WALK) if reason(words) is None]


@pytest.mark.parametrize("page", [page for page in PAGES if page != WALK], ids=lambda page: page.name)
def test_every_command_works(
    page: Path, walked: Path, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [words for words in commands(page) if reason(words) is None]
    if not wanted:
        return
    shutil.copytree(walked, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    for words in wanted:
        do(words, pool)


def test_commands_that_are_not_run_are_parsed() -> None:
    left = [words for page in PAGES for words in commands(page) if reason(words) is not None]
    for words in left:
        try:
            understand(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{shlex.join(words)}: {error}") from error
    assert [begun for begun in NOT_DONE if not any(shlex.join(words).startswith(begun) for words in left)] == []


def test_commands_are_found() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 80 and {words[0] for words in found} == set(LAUNCHERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_is_overlooked(page: Path) -> None:
    lines = [line for line in code(page)[0].splitlines() if re.search(rf"python\d? (?:{PROGRAM})", line)]
    assert [line for line in lines if line.strip().removeprefix("$ ").split()[0] not in LAUNCHERS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_and_options_that_are_mentioned_exist(page: Path) -> None:
    for program, rest in re.findall(rf"`(?:python )?({PROGRAM}|scripts/[\w/]+\.\w+)( [^`\n]*)?`", code(page)[1]):
        reader = "megatron3d/config/cli.py" if program == "pretrain_gpt.py" else program
        source = (ROOT / reader).read_text(encoding="utf-8")
        if re.search(r"\badd_(overwrite|load|iteration)\(", source):
            source += (ROOT / "megatron3d/runtime/arguments.py").read_text(encoding="utf-8")
        assert [flag for flag in re.findall(r"--[a-z-]+", rest) if f'"{flag}"' not in source] == [], f"{program}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(REPOSITORY_FILE, text)) - ELSEWHERE
    linked = {target for target in re.findall(r"\]\(([^)#:]+)", text) if not (page.parent / target).exists()}
    assert {name for name in named if not (ROOT / name).exists()} | linked == set()


def test_architecture_follows_its_picture() -> None:
    """Under the heading of each mode the page names the picture's files, in the picture's order."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for title, steps in FLOWS.items():
        part = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        places = [part.find(f"(../megatron3d/{step.file})") for step in steps]
        assert -1 not in places and places == sorted(places), (title, places)


def files_of_way(title: str) -> list[str]:
    """Return the files of a way through the code by their module's names, in the order of its table."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    part = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\| \[[^\]]*\]\(\.\./([^)]*)\.py\) \|", part, re.M)
    return [file.replace("/", ".") for file in files]


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_way_through_the_code_is_short(title: str) -> None:
    files = files_of_way(title)
    assert 1 < len(files) <= MOST_FILES[title] and len(set(files)) == len(files)


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_way_through_the_code_follows_its_imports(title: str) -> None:
    """Every file of a way imports one of its others or is imported by one, so that the way has no gap."""
    files = files_of_way(title)
    trees = {name: ast.parse(SOURCES[name].read_text(encoding="utf-8")) for name in (*files, *THROUGH)}
    links = {(name, other) for name, tree in trees.items() for _, other in imported_modules(tree)}
    reached, left = set[str](), {files[0]}
    while left:
        reached |= left
        left = {b for a, b in links | {(b, a) for a, b in links} if a in reached and b in trees} - reached
    assert set(files) <= reached


def test_what_is_added_names_its_files() -> None:
    """Each kind of entry lists a few files, which exist, and each of them once."""
    page = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", page, re.M)
    assert [title for title, _ in kinds] == list(KINDS_OF_ENTRIES)
    for title, part in kinds:
        files = re.findall(r"^\| `([^`]*)` \|", part, re.M)
        assert 1 < len(files) < 15 and len(set(files)) == len(files), title
        assert [name for name in files if not (ROOT / name).is_file()] == [], title


def test_explained_messages_exist_in_the_code() -> None:
    """The fixed parts of each quoted message occur in a string of the code."""
    files = [*(ROOT / "megatron3d").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    said = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in files))
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    messages = [message for row in rows for message in re.findall("`([^`]+)`", row)]
    parts = [part.strip() for message in messages for part in re.split("…", message)]
    assert len(messages) > 20
    assert [part for part in parts if part and part not in said] == []
