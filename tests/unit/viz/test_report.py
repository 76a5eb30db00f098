"""Fact: the HTML report shows what the run recorded, points out failures, and opens without a network.

Headless Chromium renders it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from megatron3d.errors import ExitCode, escaped
from megatron3d.metrics.journal import FILE_NAME, read_journal
from megatron3d.parallel.mesh import ranges
from megatron3d.viz.report import is_finished, report
from tests.support.pool import Pool
from tests.support.tiny_run import in_run, run_as_rank, write_config
from tools import plot_run

SECTIONS = ("Curves", "Time of a step", "Mesh", "Stages", "Memory", "Pipeline", "Configuration")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PLAYWRIGHT = "chromium*/chrome-*/*"
# What a browser would fetch.
REFERENCES = frozenset({"src", "srcset", "href", "xlink:href", "data", "poster", "action", "formaction", "background"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """Return a run of two stages with three steps, an evaluation and no trace."""
    here = tmp_path_factory.mktemp("pictures")
    folder, config = here / "<b>run & more", write_config(here)
    asked = [*in_run(str(folder)), "parallel.pipeline_model_parallel_size=2", "train.train_iters=3"]
    assert pool.run(run_as_rank, 2, config, [[*asked, "train.eval_interval=2"]]) == [[ExitCode.DONE]] * 2
    return folder


class Reader(HTMLParser):
    """Collect words, headings and cells of a page, and the resources that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = [value or "" for name, value in attrs if name in REFERENCES]
        self.fetched += [value for value in named if not value.startswith("#")]
        self.fetched += [url for _, value in attrs for url in re.findall(r"url\(([^#)][^)]*)\)", value or "")]

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self.headings.append(data)


def test_the_page_shows_the_run(trained: Path) -> None:
    rows = read_journal(trained / FILE_NAME)
    page = Reader(report(trained))
    assert [heading for heading in page.headings if heading in SECTIONS] == list(SECTIONS)
    assert page.fetched == [] and "b" not in page.tags and "script" not in page.tags
    assert page.tags.count("svg") == 2, "curves, and the predicted pipeline"
    start, last = rows[0]["start"], [row for row in rows if "lm_loss" in row][-1]
    assert start["mesh"]["pipeline"] == 2 and [stage["rank"] for stage in start["stages"]] == [0, 1]
    told = ["<b>run & more", "3 of 3", f"{last['lm_loss']:.6g}", f"{start['model']['num_parameters']:,} parameters"]
    told += ["forward-compute", "along pipeline", "parallel.pipeline_model_parallel_size", "command line"]
    told += [f"{stage['num_parameters']:,}" for stage in start["stages"]] + [start["step_s"]["unknown"]]
    assert [text for text in told if text not in page.words] == []
    assert is_finished(rows) and not is_finished(rows[:2])


def table(page: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with a cell."""
    (body,) = re.findall(rf"<table>\s*<tr><th>{re.escape(first)}</th>.*?</table>", page, re.S)
    rows = (re.findall(r"<td>(.*?)</td>", row, re.S) for row in body.split("<tr>"))
    return [row for row in rows if row]


def test_derived_values_are_values(trained: Path) -> None:
    """config.yaml has null for them, and what they are in a comment."""
    given, defaults = report(trained).split("<summary>")
    rows = {key: (value, origin) for key, value, origin in table(given, "key")}
    assert rows["model.ffn_hidden_size"] == ("128", "derived") and rows["train.train_iters"] == ("3", "command line")
    assert all(value != "null" for value, origin in rows.values() if origin == "derived")
    unset = {key: (value, origin) for key, value, origin in table(defaults, "key")}
    assert unset["model.kv_lora_rank"] == ("null", "default")


def test_axes_of_experts_and_active_parameters_are_shown(tmp_path: Path, pool: Pool) -> None:
    config, folder = write_config(tmp_path), tmp_path / "run"
    asked = [*in_run(str(folder)), "parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=4"]
    asked += ["model.num_moe_experts=8", "model.moe_router_topk=2", "train.train_iters=1"]
    assert pool.run(run_as_rank, 8, config, [asked]) == [[ExitCode.DONE]] * 8
    page = report(folder)
    assert table(page, "axis") == [["pipeline", "1"], ["replica", "1"], ["data", "4"], ["t", "2"]]
    axes = table(page, "axis of experts")
    assert axes == [["edata", "2", "data.0"], ["expert", "4", "data.1 x t"], ["etensor", "1", ""]]
    model = read_journal(folder / FILE_NAME)[0]["start"]["model"]
    weights = model["num_layers"] * (8 - 2) * 2 * 32 * model["experts"]["ffn_hidden_size"]
    biases = model["num_layers"] * (8 - 2) * (model["experts"]["ffn_hidden_size"] + 32)
    assert model["num_active_parameters"] == model["num_parameters"] - weights - biases
    assert f"({model['num_active_parameters']:,} active for a token)" in page


def test_the_title_is_the_name_of_the_run(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quickstart" / "checkpoints"
    shutil.copytree(trained, folder)
    assert "<title>quickstart: iteration 3</title>" in report(folder) and "<h1>quickstart</h1>" in report(folder)


def test_parts_of_a_step_are_next_to_their_prediction(trained: Path, tmp_path: Path) -> None:
    rows = read_journal(trained / FILE_NAME)
    rows[0]["start"]["step_s"] = {"cluster": "elsewhere", "total": 1e6, "parts": {"computation": 60.0, "update": 0.5}}
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = Reader(report(tmp_path)).words
    steps = [row for row in rows if "timers" in row]
    update = 1e-3 * median(row["timers"]["optimizer"]["mean"] for row in steps)
    assert f"update0.5{update:.4g}" in words.replace("\n", "") and "on elsewhere" in words and "-100%" in words


def test_problems_of_a_run_are_highlighted(tmp_path: Path) -> None:
    """The report also handles a run that wrote nothing but steps, as another version may have."""
    steps = [{"iteration": i, "lm_loss": 1.0 if i < 3 else float("nan"), "elapsed_ms": 5.0} for i in (1, 2, 3)]
    others = {"straggler": "rank 5 is slow", "stop": "signal SIGTERM"}
    rows: list[dict[str, Any]] = [*steps, *({"iteration": 3, kind: why} for kind, why in others.items())]
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(tmp_path, refresh_s=7)
    words = Reader(text).words
    assert "1 logged step(s) have a loss" in words
    events = table(text.partition("<h2>Events</h2>")[2], "iteration")  # as they were written
    assert events == [["3", "not finite", "loss nan, norm None"], *(["3", *event] for event in others.items())]
    assert '<meta http-equiv="refresh" content="7">' in text


def test_foreign_text_is_harmless_in_the_page(trained: Path, tmp_path: Path) -> None:
    """Names of folders and hosts, and pictures, come from elsewhere."""
    folder = tmp_path / "r\x1b[2J\u202e\udcff"
    shutil.copytree(trained, folder)
    rows = read_journal(folder / FILE_NAME)
    rows[0]["start"]["ranks"] = {"host\x9b": [0, 1]}
    (folder / FILE_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "traces").mkdir()
    (folder / "traces" / "iter_0000001.svg").write_text("<svg><text>\x1b]0;x\x07</text></svg>")
    page = report(folder)
    page.encode()
    assert escaped(page) == page
    assert "r\\x1b[2J\\u202e\\udcff" in page and "host\\x9b" in page and "\\x1b]0;x\\x07" in page


def test_a_live_page_is_rewritten_until_the_run_ends(trained: Path, tmp_path: Path) -> None:
    """The final page no longer asks the browser to reload."""
    lines = (trained / FILE_NAME).read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if "lm_loss" in line)
    (tmp_path / FILE_NAME).write_text("".join(lines[:last]))
    output, codes, asks_again = tmp_path / "run.html", list[int](), '<meta http-equiv="refresh" content="1">'
    arguments = [str(tmp_path), "--output", str(output), "--refresh", "1"]
    drawing = threading.Thread(target=lambda: codes.append(plot_run.main(arguments)))
    drawing.start()
    while not output.exists() and drawing.is_alive():
        time.sleep(0.05)
    assert asks_again in output.read_text()
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write(lines[last])
    drawing.join(timeout=100)
    assert codes == [0] and asks_again not in output.read_text()


def test_runs_of_ranks() -> None:
    assert ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3, 8, 10-11" and ranges([4]) == "4"


def browser() -> str | None:
    """Return Chromium or Chrome, from the system or from Playwright."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    kept = sorted(Path.home().glob(f".cache/ms-playwright/{PLAYWRIGHT}"))
    return next(iter([*found, *(str(path) for path in kept if path.name in ("chrome", "headless_shell"))]), None)


@pytest.mark.skipif(browser() is None, reason="neither Chromium nor Chrome is installed, to look at the page with")
def test_a_browser_renders_the_page(trained: Path, tmp_path: Path) -> None:
    """Without a network, the picture has many colours, words at the top, and curves."""
    path, shot = tmp_path / "run.html", tmp_path / "run.png"
    path.write_text(report(trained), encoding="utf-8")
    chrome = [str(browser()), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    chrome += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}/profile", "--hide-scrollbars"]
    chrome += ["--window-size=1200,2000", "--enable-logging=stderr", f"--screenshot={shot}", path.as_uri()]
    done = subprocess.run(chrome, capture_output=True, text=True, timeout=240)
    assert shot.is_file(), done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    pixels = (imread(shot)[..., :3] * 255).astype(np.int64)
    assert pixels.shape == (2000, 1200, 3)
    colours = np.unique(pixels.reshape(-1, 3) @ [1 << 16, 1 << 8, 1])
    assert len(colours) > 100
    blue = np.abs(pixels - [31, 119, 180]).sum(-1) < 40
    assert blue.sum() > 300, "the curves of the first run are blue"
