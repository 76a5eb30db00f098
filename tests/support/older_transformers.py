"""Logits of folders by another version of transformers, which is installed into a folder of its own by pip.

python -m tests.support.older_transformers FOLDER ...       writes FOLDER/logits.pt
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.peers import widened
from tests.support.tiny_run import ROOT

# The last release of the major version before, with the releases of two libraries that it asks for.
OLDER = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
TOKENS = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(3))
LOGITS = "logits.pt"


def install_older(folder: Path) -> Path:
    """Install the older version into a folder; skip the test where pip cannot reach an index that has it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--retries", "1", "--timeout", "10", "--target", str(folder), *OLDER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode:
        reasons = ("No matching distribution", "Connection", "Network is unreachable", "Name or service")
        assert any(reason in done.stderr for reason in reasons), done.stderr
        pytest.skip(f"pip reaches no index with {OLDER[0]}: {done.stderr.splitlines()[-1]}")
    return folder


def older_logits(installed: Path, folders: Sequence[Path]) -> list[Tensor]:
    """Return the logits that the version of transformers in a folder computes for each folder of a model."""
    command = [sys.executable, "-m", "tests.support.older_transformers", *map(str, folders)]
    searched = os.pathsep.join((str(installed), str(ROOT)))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": searched}, cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == OLDER[0].partition("==")[2]
    return [torch.load(folder / LOGITS) for folder in folders]


def logits_of(folder: Path) -> Tensor:
    """Return the logits of `TOKENS` in float64, by the version of transformers that is imported."""
    kernels = {"attn_implementation": "eager"}
    if int(transformers.__version__.partition(".")[0]) > 4:
        kernels["experts_implementation"] = "eager"
    with widened():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, local_files_only=True, **kernels
        )
        with torch.no_grad():
            logits: Tensor = model.eval()(TOKENS, use_cache=False).logits
    return logits


def main(folders: Sequence[Path]) -> None:
    """Write the logits of each folder of a model next to its files."""
    for folder in folders:
        torch.save(logits_of(folder), folder / LOGITS)
    print(transformers.__version__)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
