"""Print every key of the configuration as a page of Markdown: `show_config.py > docs/configuration.md`."""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import sys
from collections.abc import Iterator, Mapping, Sequence

from megatron3d.runtime.arguments import ToolParser
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    return ToolParser("show_config.py", description=__doc__.split(":")[0])


if __name__ == "__main__":
    parse_first(make_parser())

from pydantic.fields import FieldInfo

from megatron3d.config.read import expected
from megatron3d.config.schema import Config
from megatron3d.config.yaml_origins import show

HEAD = """# Configuration

Every key, as `megatron3d/config/schema.py` and `megatron3d/model/option_table.py` declare it;
`python tools/show_config.py` makes this page.  A YAML file has these sections; any key can be given on the command line
as `section.key=value`.  An unknown key is an error, `--check` reports every problem at once, and `config.yaml` in a
run's folder says where each value came from.  Keys of a feature that is off, such as `moe_*` of a dense model, are
named in one warning.  Numbers are at most 10^12, and sizes of models, batches and layouts at most what is declared."""

# Page about each key, by how the key begins.
PAGES: Mapping[str, str] = {
    "model.window": "long_context.md",
    "model.moe": "moe.md",
    "model.num_moe": "moe.md",
    "model.": "models.md",
    "parallel.tensor": "tensor_parallel.md",
    "parallel.sequence": "tensor_parallel.md",
    "parallel.tp": "tensor_parallel.md",
    "parallel.pipeline": "pipeline.md",
    "parallel.virtual": "pipeline.md",
    "parallel.zero": "data_parallel.md",
    "parallel.context": "long_context.md",
    "parallel.cp": "long_context.md",
    "parallel.num_distributed": "data_parallel.md",
    "train.bucket": "data_parallel.md",
    "train.grad_reduce": "data_parallel.md",
    "train.recompute": "memory.md",
    "train.cpu_offloading": "memory.md",
    "train.precision": "precision.md",
    "train.max_nonfinite": "survival.md",
    "train.rollback": "survival.md",
    "train.check_weight_hash": "survival.md",
    "data.": "data.md",
    "checkpoint.": "checkpoints.md",
    "logging.": "watching.md",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page of all keys."""
    return run_tool(lambda _: print(page()), make_parser(), argv)


def page() -> str:
    """Return the page without its last newline."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield HEAD
    for section, field in Config.model_fields.items():
        kind = type(field.default)
        yield from ("", f"## {section}", "", _cell(kind.__doc__ or ""), "")
        yield from ("| key | default | values | |", "|---|---|---|---|")
        for name, inner in kind.model_fields.items():
            cells = (
                _link(f"{section}.{name}"),
                _default(inner),
                _cell(expected(section, name)),
                _cell(inner.description or ""),
            )
            yield f"| {' | '.join(cells)} |"


def _default(field: FieldInfo) -> str:
    """Return the default; empty where it is derived, as the description then says."""
    return "" if field.default is None else f"`{show(field.default)}`"


def _link(key: str) -> str:
    """Return the key's name, with a link to the page about it where there is one."""
    pages = [page for prefix, page in PAGES.items() if key.startswith(prefix)]
    name = f"`{key.partition('.')[2]}`"
    return f"[{name}]({pages[0]})" if pages else name


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
