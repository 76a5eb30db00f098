"""Fuzz the readers of all file formats.

python -m tests.fuzz [TARGET ...] [--inputs 20000] [--seed 0]     exit code 1 where an input fails
python -m tests.fuzz TARGET --only 123                            one input again, whose files are kept
python -m tests.fuzz --defects                                    exit code 1 where a seeded defect is not found
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.defects import DEFECTS
from tests.fuzz.runner import MAX_FAILURES, Failure, Fuzzer, Target
from tests.fuzz.targets import TARGETS


def cause(failure: Failure) -> str:
    """Return the kind of a failure and the last line of the package in its traceback."""
    lines = [line.strip() for line in failure.detail.splitlines() if "megatron3d/" in line]
    return f"{failure.kind} {lines[-1] if lines else failure.detail[:80]}"


def fuzz(target: Target, seed: int, indices: range, max_failures: int = MAX_FAILURES) -> Sequence[Failure]:
    """Fuzz one target; print a line, and one failure of each cause.  The files of a single input are kept."""
    begin, is_single = time.monotonic(), len(indices) == 1
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target.name}-"))
    outcome = Fuzzer(target, folder, seed, max_failures).run(indices)
    numbers = f"{outcome.num_read:6} read  {outcome.num_refused:6} refused  {len(outcome.failures):3} failed"
    print(f"{target.name:16} {numbers}  {time.monotonic() - begin:6.1f} s")
    for failure in {cause(failure): failure for failure in reversed(outcome.failures)}.values():
        print(f"  {failure.kind}: python -m tests.fuzz {target.name} --seed {seed} --only {failure.number}")
        lines = failure.detail.splitlines()
        print("\n".join(f"    {line[:300]}" for line in (lines if is_single else lines[-3:])))
    if is_single:
        print(f"  its files: {folder}/input")
    else:
        shutil.rmtree(folder)
    sys.stdout.flush()
    return outcome.failures


def find_defects(seed: int, indices: range) -> bool:
    """Fuzz with each seeded defect until the first failure; return whether all were found."""
    kinds = {}
    for name, defect in DEFECTS.items():
        with defect.seed():
            kinds[name] = [failure.kind for failure in fuzz(TARGETS[defect.target], seed, indices, max_failures=1)]
        print(f"{name}: {'found' if kinds[name] == [defect.kind] else 'NOT FOUND'}", flush=True)
    return all(kinds[name] == [defect.kind] for name, defect in DEFECTS.items())


def main() -> int:
    """Fuzz the targets that were asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--inputs", type=int, default=20_000, help="inputs of each target; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; default: %(default)s")
    parser.add_argument("--only", type=int, metavar="INDEX", help="number of the only input")
    parser.add_argument("--defects", action="store_true", help="show that seeded defects are found")
    asked = parser.parse_args()
    if unknown := set(asked.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}; use {', '.join(TARGETS)}")
    indices = range(asked.inputs) if asked.only is None else range(asked.only, asked.only + 1)
    if asked.defects:
        return 0 if find_defects(asked.seed, indices) else 1
    failures = [fuzz(TARGETS[name], asked.seed, indices) for name in asked.targets or TARGETS]
    return 1 if any(failures) else 0


if __name__ == "__main__":
    sys.exit(main())
