"""Fact: imports go one way, value modules load without torch, and ambient state lives in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 6

# Packages of values, tensors and lists: they take their settings from RunSpec and never read the configuration.
BELOW_CONFIG = frozenset(
    {
        "errors",
        "runtime",
        "parallel",
        "comm",
        "linear",
        "attention",
        "experts",
        "ops",
        "zero",
        "data",
        "model",
        "pipeline",
    }
)

# Packages of values load no torch, nor do files of the other packages that are named plan, spec or table, so that
# checks, predictions and plans start at once; an engine, which runs a list of values on tensors, loads it everywhere.
VALUES = frozenset({"errors", "runtime", "config", "parallel", "pipeline", "metrics", "forecast", "launch"})
VALUE_NAME, TENSOR_NAME = re.compile(r"(.*_)?(plan|spec|table)"), "engine"

Rule = Callable[[ast.Module], list[int]]


def module_name(path: Path) -> str:
    """Return the dotted name of a file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for pattern in ("megatron3d/**/*.py", "tools/**/*.py", "benchmarks/**/*.py", "pretrain_gpt.py")
    for path in sorted(ROOT.glob(pattern))
}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything that is imported, at any level of the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: a relative import hides its layer"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of imported modules of this repository."""
    for line, name in imports(tree):
        if name in SOURCES:
            yield line, name
        elif (parent := name.rpartition(".")[0]) in SOURCES:
            yield line, parent


def reads(*names: str) -> Rule:
    """Return a rule that finds lines that import or name one of these dotted names, or something inside them."""

    def is_inside(name: str) -> bool:
        return any(name == outer or name.startswith(outer + ".") for outer in names)

    def rule(tree: ast.Module) -> list[int]:
        attributes = [(n.lineno, ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        return [line for line, name in [*imports(tree), *attributes] if is_inside(name)]

    return rule


def device_literals(tree: ast.Module) -> list[int]:
    """Return lines with the name of a device as a string."""
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [n.lineno for n in texts if str(n.value).partition(":")[0] == "cuda"]


def choice_literals(tree: ast.Module) -> list[int]:
    """Return lines with the name of the pipeline axis, of a mode or of a schedule as a string."""
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [n.lineno for n in texts if n.value in CHOICES]


def global_statements(tree: ast.Module) -> list[int]:
    """Return lines that rebind a module's name from inside a function."""
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Global)]


def silent_asserts(tree: ast.Module) -> list[int]:
    """Return lines with an assertion without a message."""
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert) and n.msg is None]


def long_functions(tree: ast.Module) -> list[int]:
    """Return the first lines of functions that are too long."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [n.lineno for n in functions if (n.end_lineno or 0) - n.lineno >= MAX_FUNCTION_LINES]


def many_positional(tree: ast.Module) -> list[int]:
    """Return the first lines of functions that take more arguments by position than can be told apart.

    Kernels and the forward of an autograd function are called by position only.
    """
    found = []
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        is_kernel = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
        if not is_kernel and names[:1] != ["ctx"]:
            found += [node.lineno] * (len(names) - (names[:1] in (["self"], ["cls"])) > MAX_POSITIONAL)
    return found


# Benchmarks that time torch's own parallelism and checkpoints next to ours, or torch's process groups.
PEERS = tuple(
    f"benchmarks.{name}"
    for name in (
        "checkpoint",
        "checkpoint_index",
        "context",
        "data_parallel",
        "peers.dtensor_gpt",
        "peers.dtensor_traffic",
        "gpu.gpu_sections",
        "groups",
        "common.live",
        "moe",
        "optimizers",
        "overlaps",
        "pipeline",
        "restore",
        "tensor_parallel",
        "peers.torch_executor",
    )
)

# Names of an axis, a mode and a schedule, each of which is a constant of one table; programs take what a person types.
CHOICES = ("pipeline", "1d", "1f1b")
TABLES = ("megatron3d.parallel.mesh", "megatron3d.parallel.modes.one_d", "megatron3d.pipeline.schedules")
TYPED = tuple(name for name in SOURCES if not name.startswith("megatron3d"))

# Rule, exempt modules, a line that breaks it.
RULES: Mapping[str, tuple[Rule, tuple[str, ...], str]] = {
    "environment": (
        reads("os.environ", "os.getenv", "os.putenv"),
        ("megatron3d.runtime.process",),
        "import os\nos.environ",
    ),
    "torch.distributed": (
        reads("torch.distributed"),
        (
            *("megatron3d.comm.process_comm", "megatron3d.comm.process_groups", "megatron3d.comm.objects"),
            "megatron3d.comm.peer_link",
            "megatron3d.comm.matmul_rounds",
            *("megatron3d.runtime.process", "megatron3d.runtime.heartbeat", "megatron3d.runtime.members"),
            *PEERS,
        ),
        "from torch import distributed",
    ),
    # Only Megatron-LM's files hold pickles, which unpicklers read that refuse every name but those of plain values.
    "unpickling": (reads("pickle", "torch.load"), ("megatron3d.convert.torch_folder",), "torch.load(path)"),
    "device literal": (device_literals, ("megatron3d.runtime.process", "megatron3d.hardware"), 'move("cuda:0")'),
    "choice literal": (choice_literals, (*TABLES, *TYPED), 'mesh.coord("pipeline")'),
    "global": (global_statements, (), "def f():\n    global x"),
    "silent assert": (silent_asserts, (), "assert x"),
    "many positional": (many_positional, (), "def f(a, b, c, d, e, f, g): ..."),
    "long function": (long_functions, (), "def f():\n" + "    x\n" * MAX_FUNCTION_LINES),
}


PROGRAMS = sorted(
    name
    for name in SOURCES
    if (name.startswith("tools.") and 'if __name__ == "__main__":' in SOURCES[name].read_text(encoding="utf-8"))
    or name in ("pretrain_gpt", "megatron3d.launch.__main__", "megatron3d.runtime.local_ranks")
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_while_a_program_imports_is_prepared_first(name: str) -> None:
    first, second = (imported for _, imported in sorted(imports(parse(SOURCES[name])))[:2])
    assert (first, second) == ("__future__.annotations", "megatron3d.runtime.interrupt")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("name", RULES)
def test_rule_holds_everywhere(name: str) -> None:
    rule, exempt, _ = RULES[name]
    found = {module: rule(parse(path)) for module, path in SOURCES.items() if module not in exempt}
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_finds_its_example(name: str) -> None:
    rule, _, example = RULES[name]
    assert rule(ast.parse(example))


def find_cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return one cycle of a directed graph, its first node repeated at the end; [] where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        found = next((cycle for other in graph.get(node, ()) if (cycle := visit(other, [*path, node]))), [])
        done.add(node)
        return found

    return next((cycle for node in graph if (cycle := visit(node, []))), [])


def package(module: str) -> str:
    """Return the top-level package of a module: `parallel` of `megatron3d.parallel.mesh`, `tools` of `tools.plan`."""
    first, *rest = module.split(".")
    return rest[0] if first == "megatron3d" and rest else first


def package_imports() -> dict[str, dict[str, str]]:
    """Return for each package the packages that it imports, each with one importing line."""
    graph: dict[str, dict[str, str]] = {}
    for module, path in SOURCES.items():
        for line, name in imported_modules(parse(path)):
            if package(name) not in (package(module), "megatron3d"):
                graph.setdefault(package(module), {}).setdefault(package(name), f"{module}:{line} imports {name}")
    return graph


def test_packages_import_each_other_without_a_cycle() -> None:
    graph = package_imports()
    cycle = find_cycle(graph)
    lines = [graph[one][other] for one, other in pairwise(cycle)]
    assert not cycle, "\n".join([" -> ".join(cycle), *lines])


def test_modules_import_each_other_without_a_cycle() -> None:
    graph = {module: [name for _, name in imported_modules(parse(path))] for module, path in SOURCES.items()}
    cycle = find_cycle({module: [name for name in names if name != "megatron3d"] for module, names in graph.items()})
    assert not cycle, " -> ".join(cycle)


def test_a_cycle_is_found_and_named() -> None:
    assert find_cycle({"a": ["b", "d"], "b": ["c"], "c": ["d"], "d": []}) == []
    assert find_cycle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]


def test_values_and_tensors_do_not_read_the_configuration() -> None:
    graph = package_imports()
    assert [line for name in BELOW_CONFIG for other, line in graph.get(name, {}).items() if other == "config"] == []


def loads_torch(module: str) -> bool:
    """Return whether a module may import torch."""
    name = module.rpartition(".")[2]
    if package(module) == module or name == TENSOR_NAME:
        return True
    return not (VALUE_NAME.fullmatch(name) or package(module) in VALUES)


def repeated_classes(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the modules of every public class name that occurs more than once."""
    found: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_class_name_exists_once() -> None:
    trees = {name: parse(path) for name, path in SOURCES.items() if name.startswith("megatron3d")}
    assert repeated_classes(trees) == {}


def test_a_repeated_class_name_is_found() -> None:
    trees = {"a": ast.parse("class Entry: ..."), "b": ast.parse("class Entry: ...\nclass Other: ...")}
    assert repeated_classes(trees) == {"Entry": ["a", "b"]}


# Attributes of other libraries' objects that those libraries mean to be assigned, by module.
LIBRARY_ATTRIBUTES = {
    "megatron3d.comm.process_groups": {"max_ctas", "_timeout"},
    "megatron3d.inference.server": {"should_exit"},
    "megatron3d.linear.main_grad": {"grad"},
    "megatron3d.convert.tokenizer": {"pre_tokenizer", "decoder", "normalizer", "post_processor"},
    "megatron3d.data.preprocess.tokenizer_training": {"pre_tokenizer", "decoder"},
    "megatron3d.runtime.program": {"stdout", "stderr"},
    "megatron3d.runtime.arguments": {"required"},
    # In the process of a forked rank, which becomes what the program would have been started as.
    "megatron3d.runtime.local_ranks": {"argv", "stdout", "stderr", "excepthook", "__file__"},
    "megatron3d.model.compile": {"forward", "fail_on_recompile_limit_hit", "recompile_limit"},
}


def assigned_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Return every attribute that is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def declared_attributes(tree: ast.Module) -> set[str]:
    """Return the attributes that a class of the module annotates or assigns on `self`."""
    found = set()
    for body in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        fields = (node.target for node in body.body if isinstance(node, ast.AnnAssign))
        found |= {field.id for field in fields if isinstance(field, ast.Name)}
        found |= {node.attr for node in assigned_attributes(body) if ast.unparse(node.value) == "self"}
    return found


def undeclared_attributes(tree: ast.Module, declared: Set[str]) -> list[str]:
    """Return assignments of an attribute, to another object than self, that no class declares."""
    own = {"self", "cls", "ctx"}
    assigned = (node for node in assigned_attributes(tree) if ast.unparse(node.value) not in own)
    return [f"{node.lineno}: {ast.unparse(node)}" for node in assigned if node.attr not in declared]


def test_no_attribute_is_set_on_foreign_objects() -> None:
    trees = {name: parse(path) for name, path in SOURCES.items() if name.startswith("megatron3d")}
    declared = set().union(*map(declared_attributes, trees.values()))
    found = {
        name: undeclared_attributes(tree, declared | LIBRARY_ATTRIBUTES.get(name, set()))
        for name, tree in trees.items()
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_foreign_attribute_is_found() -> None:
    assert undeclared_attributes(ast.parse("def f(leaf):\n    leaf.grad_sink = 1"), set()) == ["2: leaf.grad_sink"]


def test_values_load_without_torch() -> None:
    names = [module for module in SOURCES if module.startswith("megatron3d") and not loads_torch(module)]
    program = f"import sys, importlib\nfor name in {names}:\n    importlib.import_module(name)\n"
    program += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
