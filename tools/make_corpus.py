"""Makes a corpus of real text on any machine: the sources of Python's standard library with their documentation.

    python tools/make_corpus.py --output data/stdlib.jsonl

One line per module, {"name": ..., "text": ...}, in an order that is random but always the same, so that the last part,
which validates, is like the others.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import json
import sys
import sysconfig
import tokenize
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import ToolParser, add_overwrite, real, require_free
from megatron3d.runtime.program import byte_progress, parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="make_corpus", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to make")
    parser.add_argument("--max-mb", type=real(), help="stop before the file is larger; default: everything")
    parser.add_argument(
        "--source", type=Path, default=Path(sysconfig.get_path("stdlib")), help="default: the running Python's library"
    )
    add_overwrite(parser)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.data.token_files.files import replace_output

INSTALLED = frozenset({"site-packages", "dist-packages", "__pycache__"})


def modules(folder: Path) -> list[Path]:
    """Return the Python files of the standard library without installed packages, ordered by hashes of their names."""
    names = (path.relative_to(folder) for path in folder.rglob("*.py"))
    chosen = [name for name in names if INSTALLED.isdisjoint(name.parts)]
    return [folder / name for name in sorted(chosen, key=lambda name: sha256(name.as_posix().encode()).digest())]


def read_source(path: Path) -> str | None:
    """Return the text of a module; None where it cannot be decoded (the library has such files as test data)."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        text.encode()
    except (SyntaxError, UnicodeError, OSError):
        return None
    return text


def make_corpus(arguments: argparse.Namespace) -> None:
    """Write the corpus, and print its counts."""
    folder = arguments.source
    paths = modules(folder)
    if not paths:
        raise UserError(f"--source {folder}: no Python files in it; name the folder of a standard library")
    require_free("--output", [arguments.output], paths, arguments.overwrite)
    limit = float("inf") if arguments.max_mb is None else arguments.max_mb * 1e6
    written = skipped = num_bytes = 0
    with byte_progress() as progress, replace_output(arguments.output) as file:
        task = progress.add_task("reading modules", total=sum(path.stat().st_size for path in paths))
        for path in paths:
            progress.advance(task, path.stat().st_size)
            text = read_source(path)
            if not text:
                skipped += text is None
                continue
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            line = (json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n").encode()
            if num_bytes + len(line) > limit:
                break
            file.write(line)
            written, num_bytes = written + 1, num_bytes + len(line)
        if not written:
            raise UserError(f"--max-mb {arguments.max_mb}: no module is that small; use 1 or more")
    print(f"{arguments.output}: {written} modules, {num_bytes / 1e6:.1f} MB; {skipped} undecodable files left out")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(make_corpus, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
