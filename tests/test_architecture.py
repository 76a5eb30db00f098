"""The code keeps its shape: imports go one way, values load without torch, and what is ambient lives in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60

# A module belongs to the longest name here that it starts with, and imports from its own layer and those above.
LAYERS: Mapping[str, tuple[str, ...]] = {
    "values": (
        "megatron3d",
        "megatron3d.errors",
        "megatron3d.runtime",
        "megatron3d.parallel",
        "megatron3d.pipeline",
        "megatron3d.config",
        "megatron3d.data.corpus.samples",
        "megatron3d.data.corpus.blend",
        "megatron3d.data.permutation",
        "megatron3d.data.preprocess.hub_datasets",
        "megatron3d.data.ramp",
        "megatron3d.model.architecture",
        "megatron3d.model.flops",
        "megatron3d.model.params",
        "megatron3d.model.recompute_spec",
        "megatron3d.model.stages",
        "megatron3d.analysis",
        "megatron3d.convert.model_types",
        "megatron3d.convert.config_json",
        "megatron3d.convert.tensor_names",
    ),
    "tensors": (
        "megatron3d.comm",
        "megatron3d.parallel.logical_views",
        "megatron3d.ops",
        "megatron3d.pipeline.engine",
        "megatron3d.zero",
        "megatron3d.optim",
        "megatron3d.model.compile",
        "megatron3d.data",
        "megatron3d.checkpoint",
        "megatron3d.convert.output_files",
        "megatron3d.convert.reference_models",
        "megatron3d.convert.safetensors_writer",
        "megatron3d.convert.tokenizer",
        "megatron3d.convert.hub_weights",
        "megatron3d.metrics",
        "megatron3d.hardware",
        "megatron3d.verify.flop_memory_meter",
    ),
    "model": ("megatron3d.model", "megatron3d.pipeline.executor"),
    "train": (
        "megatron3d.train",
        "megatron3d.inference",
        "megatron3d.runtime.status_store",
        "megatron3d.runtime.watchdog",
        "megatron3d.runtime.process",
        "megatron3d.verify",
        "megatron3d.convert",
        "megatron3d.analysis.calibrate",
        "megatron3d.launch",
        "megatron3d.viz",
    ),
    "programs": ("pretrain_gpt", "tools", "benchmarks"),
}
WITHOUT_TORCH = (
    "megatron3d.runtime.process",
    "megatron3d.runtime.status_store",
    "megatron3d.runtime.watchdog",
    "megatron3d.metrics",
    "megatron3d.launch.__main__",
)

Rule = Callable[[ast.Module], list[int]]


def module_name(path: Path) -> str:
    """Dotted name of a file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for pattern in ("megatron3d/**/*.py", "tools/**/*.py", "benchmarks/**/*.py", "pretrain_gpt.py")
    for path in sorted(ROOT.glob(pattern))
}


def layer(module: str) -> int:
    """Position of a module's layer."""
    prefixes = [
        (len(prefix), depth)
        for depth, group in enumerate(LAYERS.values())
        for prefix in group
        if module == prefix or (prefix != "megatron3d" and module.startswith(prefix + "."))
    ]
    assert prefixes, f"{module} has no layer: add it to LAYERS in {Path(__file__).name}"
    return max(prefixes)[1]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: a relative import hides its layer"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of the imported modules that are ours."""
    for line, name in imports(tree):
        if name in SOURCES:
            yield line, name
        elif (parent := name.rpartition(".")[0]) in SOURCES:
            yield line, parent


def reads(*names: str) -> Rule:
    """Lines that import or name one of these dotted names, or something inside."""

    def is_inside(name: str) -> bool:
        return any(name == outer or name.startswith(outer + ".") for outer in names)

    def rule(tree: ast.Module) -> list[int]:
        attributes = [(n.lineno, ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        return [line for line, name in [*imports(tree), *attributes] if is_inside(name)]

    return rule


def device_literals(tree: ast.Module) -> list[int]:
    """Lines with the name of a device as a string."""
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [n.lineno for n in texts if str(n.value).partition(":")[0] == "cuda"]


def global_statements(tree: ast.Module) -> list[int]:
    """Lines that rebind a module's name from inside a function."""
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Global)]


def silent_asserts(tree: ast.Module) -> list[int]:
    """Lines with an assertion that does not say what is wrong."""
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert) and n.msg is None]


def long_functions(tree: ast.Module) -> list[int]:
    """First lines of functions that want to be two."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [n.lineno for n in functions if (n.end_lineno or 0) - n.lineno >= MAX_FUNCTION_LINES]


# Benchmarks that time torch's own data, tensor and pipeline parallelism, and checkpoints, beside ours, or its groups.
PEERS = tuple(
    f"benchmarks.{name}"
    for name in (
        "checkpoint",
        "data_parallel",
        "dtensor_gpt",
        "dtensor_traffic",
        "groups",
        "live",
        "overlaps",
        "pipeline",
        "tensor_parallel",
        "torch_executor",
    )
)

# Rule, modules that may, a line that breaks it.
RULES: Mapping[str, tuple[Rule, tuple[str, ...], str]] = {
    "environment": (
        reads("os.environ", "os.getenv", "os.putenv"),
        ("megatron3d.runtime.process",),
        "import os\nos.environ",
    ),
    "torch.distributed": (
        reads("torch.distributed"),
        ("megatron3d.comm.process_comm", "megatron3d.runtime.process", "megatron3d.runtime.status_store", *PEERS),
        "from torch import distributed",
    ),
    "unpickling": (reads("pickle", "torch.load"), (), "torch.load(path)"),
    "device literal": (device_literals, ("megatron3d.runtime.process", "megatron3d.hardware"), 'move("cuda:0")'),
    "global": (global_statements, (), "def f():\n    global x"),
    "silent assert": (silent_asserts, (), "assert x"),
    "long function": (long_functions, (), "def f():\n" + "    x\n" * MAX_FUNCTION_LINES),
}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("name", RULES)
def test_rule_holds_everywhere(name: str) -> None:
    rule, exempt, _ = RULES[name]
    found = {module: rule(parse(path)) for module, path in SOURCES.items() if module not in exempt}
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize("name", RULES)
def test_rule_notices(name: str) -> None:
    rule, _, example = RULES[name]
    assert rule(ast.parse(example))


def test_no_file_wants_to_be_two() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in SOURCES.items()}
    assert {module: lines for module, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_one_way(module: str) -> None:
    upward = [(line, name) for line, name in imported_modules(parse(SOURCES[module])) if layer(name) > layer(module)]
    assert upward == []


def test_values_load_without_torch() -> None:
    names = [module for module in SOURCES if layer(module) == 0]
    program = f"import sys, importlib\nfor name in {[*names, *WITHOUT_TORCH]}:\n    importlib.import_module(name)\n"
    program += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
