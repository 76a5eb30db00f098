"""Run the commands of docs/getting_started.md and write what they print into its section "A recording".

    .venv/bin/python scripts/record_walk.py

It runs in the repository, where runs/first must not exist yet, and takes minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "getting_started.md"
BEGIN, END = "```text\n", "```\n"
# Of what a command prints: lines of its start and of its end, and characters of a line.
FIRST, LAST, WIDTH = 3, 7, 116


def shortened(printed: str) -> list[str]:
    """Return the first and last lines of an output, each cut at a width."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    if len(lines) > FIRST + LAST + 1:
        left_out = f"[{len(lines) - FIRST - LAST} more lines]"
        lines = [*lines[:FIRST], left_out, *lines[-LAST:]]
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines]


def perform(words: list[str]) -> list[str]:
    """Run a command, which must succeed; return its lines of the recording."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    begin = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, env=environment, text=True, **pipe)
    print(f"{time.monotonic() - begin:5.1f} s  {shlex.join(words)}", flush=True)
    if done.returncode:
        sys.exit(done.stdout)
    return [f"$ {shlex.join(words)}", *shortened(done.stdout.replace(f"{ROOT}/", "")), ""]


def main() -> None:
    """Write the configuration of the page, run its commands, and replace the recording."""
    sys.path.insert(0, str(ROOT))
    from tests.support.doc_commands import commands
    from tests.test_docs import reason

    text = PAGE.read_text(encoding="utf-8")
    ((name, config),) = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", text, re.M | re.S)
    if (ROOT / name).parent.exists():
        sys.exit(f"{Path(name).parent} exists already; move it away")
    (ROOT / name).parent.mkdir(parents=True)
    (ROOT / name).write_text(config, encoding="utf-8")
    lines = [line for words in commands(PAGE) if reason(words) is None for line in perform(words)]
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}" + "\n".join(lines).rstrip() + f"\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
