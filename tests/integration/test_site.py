"""Fact: the documentation site builds without warnings, has a page per module, and loads nothing from another site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import ROOT

EXTERNAL = re.compile(r'<(?:link|script|img)\b[^>]*(?:href|src)="(?:https?:)?//[^"]*"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a site built in strict mode, in which each warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"{done.stdout}\n{done.stderr}"
    return folder


def test_every_module_has_its_reference(site: Path) -> None:
    modules = {path.relative_to(ROOT / "megatron3d").with_suffix("") for path in ROOT.glob("megatron3d/**/*.py")}
    pages = {path.relative_to(site / "reference").with_suffix("") for path in site.glob("reference/**/*.html")}
    assert pages == {path.with_name("index") if path.name == "__init__" else path for path in modules}
    assert "MatmulPlan" in (site / "reference" / "parallel" / "matmul_plan.html").read_text()


def test_links_into_the_code_lead_to_its_reference(site: Path) -> None:
    page = (site / "architecture.html").read_text()
    assert 'href="reference/linear/matmul.html"' in page and 'href="repository/pretrain_gpt.py.html"' in page
    assert "../megatron3d" not in page


def test_pages_load_nothing_from_other_sites(site: Path) -> None:
    found = {path.name: EXTERNAL.findall(path.read_text(encoding="utf-8")) for path in site.glob("**/*.html")}
    assert {name: tags for name, tags in found.items() if tags} == {}
