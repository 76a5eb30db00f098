"""Fact: any file and overrides are a configuration or short messages, within seconds and without a traceback."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from megatron3d.config.cli import Arguments
from megatron3d.config.read import MAX_PROBLEMS, SECTIONS, read_config
from megatron3d.config.resolve import run_check
from megatron3d.config.schema import Config
from megatron3d.config.yaml_origins import parse_value, show
from megatron3d.errors import UserError
from megatron3d.pipeline.schedules import SCHEDULES

NINE = "abcdefghi"
BOMB = "a: &a [" + ",".join("x" * 9) + "]\n"
BOMB += "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(NINE))
LONG = "9" * 400


def refused(path: Path, text: str, *overrides: str) -> str:
    """Return the messages with which a text is refused, and check that they are few and short."""
    path.write_text(text, encoding="utf-8")
    begin = time.process_time()
    with pytest.raises(UserError) as caught:
        read_config(path, overrides)
    assert time.process_time() - begin < 5
    problems = caught.value.problems
    assert len(problems) <= MAX_PROBLEMS + 1 and max(map(len, problems)) < 2000 + len(str(path))
    return "\n".join(problems)


FILES: Mapping[str, tuple[str, str]] = {
    "an alias bomb": (BOMB, "more than 20000 values with every alias written out"),
    "an alias in its own anchor": ("model: &a {x: *a}\n", "with every alias written out"),
    "brackets": ("model: {vocab_size: " + "[" * 100_000 + "\n", "more than 20 levels of lists and mappings"),
    "braces": ("{" * 100_000 + "\n", "more than 20 levels of lists and mappings"),
    "many values": ("model: [" + "1," * 100_000 + "]\n", "more than 20000 values"),
    "a large file": ("#" * 300_000, "more than 262144 bytes"),
    "a bool that is none": ("train: {compile: !!bool abc}\n", 'not of type bool: "abc"'),
    "an empty int": ("train: {seed: !!int ''}\n", 'not of type int: ""'),
    "a float that is none": ("optimizer: {lr: !!float 1e}\n", 'not of type float: "1e"'),
    "a null that is none": ("train: {seed: !!null 5}\n", 'not of type null: "5"'),
    "a list for an int": ("train: {seed: !!int [1]}\n", "expected a scalar node"),
    "a date": ("train: {seed: !!timestamp 2001-01-01}\n", "tag:yaml.org,2002:timestamp"),
    "no date": ("train: {seed: !!timestamp x}\n", "tag:yaml.org,2002:timestamp"),
    "bytes": ("train: {seed: !!binary '='}\n", "tag:yaml.org,2002:binary"),
    "a set": ("train: {seed: !!set {a}}\n", "tag:yaml.org,2002:set"),
    "an omap": ("train: {seed: !!omap [1]}\n", "tag:yaml.org,2002:omap"),
    "pairs": ("train: {seed: !!pairs [1]}\n", "tag:yaml.org,2002:pairs"),
    "a merge": ("train: {!!merge <<: 1}\n", "train.<<=1"),
    "Python": ("train: {seed: !!python/object/apply:os.system [true]}\n", "python/object/apply:os.system"),
    "a long number": (f"train: {{seed: {'9' * 5000}}}\n", "not of type int: "),
    "many unknown keys": ("train: {" + ",".join(f"k{n}: 1" for n in range(9000)) + "}\n", "more problems; correct"),
    "an unhashable key": ("train: {seed: {? {a: b} : c}}\n", "found unhashable key"),
    "a long key": ("? " + "k" * 200_000 + "\n: 1\n", "kkk..."),
    "a long list": ("train: {seed: [" + "1," * 15_000 + "]}\n", "train.seed=[1,1"),
    "a list of wrong items": ("train: {recompute_modules: [" + "1," * 15_000 + "]}\n", "not allowed"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_short_message(tmp_path: Path, name: str) -> None:
    text, message = FILES[name]
    assert message in refused(tmp_path / "run.yaml", text)


OVERRIDES: Mapping[str, str] = {
    "x" * 120_000: "not of the form section.key=value",
    "x" * 120_000 + "=1": "a key without its section",
    "a" * 60_000 + "." + "b" * 60_000 + "=1": "unknown section",
    "train.seed=" + "[" * 120_000: "more than 20 levels",
    "train.seed=" + "a" * 120_000: "text is not allowed",
    "train.seed=!!bool abc": 'not of type bool: "abc"',
    "train.seed=\x00": "the value is not YAML",
    "train.seed=\udcff": "the value is not YAML",
}


@pytest.mark.parametrize("number", range(len(OVERRIDES)))
def test_a_hostile_override_is_one_short_message(tmp_path: Path, number: int) -> None:
    override, message = list(OVERRIDES.items())[number]
    assert message in refused(tmp_path / "run.yaml", "model: {}\n", override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lr: 1e-3}\noptimizer.lr: 99\n", "optimizer.lr=99 (FILE:2): the dot is for the command line"),
        ("optimizer.lr:\n", "optimizer.lr=null (FILE:1): the dot is for the command line; write lr below optimizer"),
        ("optimizer: {a.b: 1}\n", "optimizer.a.b=1 (FILE:1): unknown key"),
        ("optimiser:\n", "optimiser=null (FILE:1): a key without its section"),
        ("optimiser: {}\n", "optimiser={} (FILE:1): a key without its section"),
    ],
)
def test_no_key_of_a_file_is_ignored(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    assert message.replace("FILE", str(path)) in refused(path, text)


def test_a_section_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model:\ntrain: {}\nlogging: {wandb_name: &n a, wandb_project: *n}\n")
    assert read_config(tmp_path / "run.yaml").config.logging.wandb_project == "a"


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (
        tmp_path / "fifo",
        Path("/dev/zero"),
        tmp_path,
        tmp_path / ("x" * 300),
        Path("a\0b"),
        Path("\udcff" * 9),
    ):
        with pytest.raises(UserError, match="give a YAML file that can be read"):
            read_config(path)


SIZES: Mapping[str, str] = {
    "model.vocab_size=1000000000000": "more than 100000000, the largest that is allowed; use 100000000 or less",
    "train.global_batch_size=1000000000000000000": "more than 1000000",
    f"train.seed={LONG}": "more than 4611686018427387904",
    f"optimizer.lr={LONG}": "use a number above 0",
    "optimizer.lr=1e400": "use a number above 0",
    "optimizer.clip_grad=1e-320": "less than 1.2e-38, which fp32 rounds to 0; use 0",
    "optimizer.lr=-1e-320": "optimizer.lr",
    "train.distributed_timeout_minutes=1e-300": "0.01",
    "train.distributed_timeout_minutes=1e-9": "at least 0.01",
    "optimizer.lr=1e300": "more than 1000000000000",
    "parallel.pipeline_model_parallel_size=1000000000": "more than 1000000",
    "parallel.tensor_parallel_shape=[2,1000000000]": "more than 1000000",
    "train.distributed_timeout_minutes=1e11": "more than 1000000",
    "train.train_iters=10000000000000": "more than 1000000000000",
    f"data.data_path=[{LONG},a]": "data.data_path",
    "data.data_path=[.inf,a]": "data.data_path",
    "checkpoint.save=" + "a" * 5000: "5000 characters; use at most 4096",
}


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_an_absurd_value_is_refused_with_its_limit(tmp_path: Path, number: int) -> None:
    override, message = list(SIZES.items())[number]
    assert message in refused(tmp_path / "run.yaml", "model: {}\n", override)


PRODUCTS: Sequence[tuple[str, str]] = (
    ("parallel.pipeline_model_parallel_size=1000000", "more than model.num_layers=12"),
    (
        "parallel.pipeline_model_parallel_size=1000000 parallel.pipeline_model_parallel_layout=[12]",
        "1000000 stages are",
    ),
    ("train.global_batch_size=1000000", "more than 131072 actions; use fewer microbatches or ranks"),
    ("model.num_layers=10000 model.hidden_size=1000000 model.num_attention_heads=1", "parameters, more than 1e+15"),
    ("model.seq_length=10000000 train.micro_batch_size=1000 train.global_batch_size=1000", "attention scores"),
    ("train.rampup_batch_size=[1,1,5] train.global_batch_size=60000", "59999 steps of 1"),
)


@pytest.mark.parametrize(("typed", "message"), PRODUCTS)
def test_sizes_that_are_absurd_together_are_refused(
    tmp_path: Path, typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("data: {data_path: x, tokenizer_type: ByteTokenizer}\n")
    begin = time.process_time()
    assert run_check(Arguments(tmp_path / "run.yaml", tuple(typed.split()), check=True, world_size=1)) == 2
    assert message in capsys.readouterr().err
    assert time.process_time() - begin < 5


NUMBERS = [0, 1, 2, 3, 4, 8, 12, 64, 100, 1000, 4096, 9973, 10**5, 999_983, 2**20, 10**7, 10**8, 10**12, 2**62, 10**30]
TEXTS = [
    "null",
    "true",
    "''",
    '"\\0"',
    "!!int ''",
    "{a: b}",
    "*a",
    "&a [*a]",
    "[a, 1]",
    "x" * 300,
    "/" * 4000,
    "hf:",
    "..",
]
TEXTS += [
    "/dev/zero",
    "1,nan,1",
    "1e400,1,1",
    "1e-300",
    "1e308",
    "5e-324",
    ".nan",
    ".inf",
    "0.5",
    "-1",
    "\x1b[31m",
    "é",
]


def configurations(seed: int, count: int) -> Iterator[list[str]]:
    """Yield overrides of random keys, most of them with values that the key alone allows."""
    draw = random.Random(seed)
    keys = [f"{section}.{name}" for section, names in SECTIONS.items() for name in names]

    def value() -> str:
        some = [str(draw.choice(NUMBERS)) for _ in range(draw.choice([0, 1, 3, 3, 200]))]
        return draw.choice(
            [str(draw.choice(NUMBERS)), draw.choice(TEXTS), f"[{','.join(some)}]", draw.choice([*SCHEDULES])]
        )

    def allowed(key: str) -> str:
        section, name = key.split(".")
        for text in (value() for _ in range(20)):
            try:
                Config.model_validate({section: {name: parse_value(text)}})
            except ValueError:
                continue
            return text
        return value()

    for _ in range(count):
        yield [f"{key}={allowed(key)}" for key in draw.sample(keys, draw.choice([1, 2, 4, 8]))]


@pytest.mark.parametrize("seed", range(3))
def test_any_values_are_checked_without_a_traceback(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("data: {data_path: x, tokenizer_type: ByteTokenizer}\n")
    for overrides in configurations(seed, 50):
        begin = time.process_time()
        world_size = random.Random(str(overrides)).choice([None, 1, 4, 64, 720_720, 999_983, 10**6])
        code = run_check(Arguments(tmp_path / "run.yaml", tuple(overrides), check=True, world_size=world_size))
        said = capsys.readouterr()
        assert (code, bool(said.err)) in ((0, False), (2, True)), overrides
        assert max(map(len, said.err.splitlines()), default=0) < 3000, overrides
        assert time.process_time() - begin < 5, overrides


def test_a_shown_value_is_short_however_long_it_is() -> None:
    deep: object = 1
    for _ in range(300):
        deep = (deep, deep)
    for value in (deep, (1,) * 10**6, "x" * 10**6, 10**4000, {1: 2}):
        assert len(show(value)) <= 200
    assert show((1, "a b", None, (True, 2.5))) == '[1,"a b",null,[true,2.5]]'
