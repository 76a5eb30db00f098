"""Fact: ranks on this machine get the launcher's signals, end together, and their exit code is the launcher's."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron3d.errors import ExitCode
from megatron3d.runtime.local_ranks import reserved_port
from tests.support.processes import start
from tests.support.tiny_run import ROOT

RANK = """
import os, signal, sys, time
rank = int(os.environ.get("RANK", "-1"))
def wait():
    os.write(1, f"rank {rank} of {os.environ.get('WORLD_SIZE')} waits\\n".encode())
    for _ in range(1200):  # not one long sleep: a signal just before it is handled only after it
        time.sleep(0.05)
def stop(*_):
    time.sleep(rank)
    sys.exit(3)
"""


STARTED = r"> starting [12] ranks? after [0-9]+\.[0-9] s\n"


def launch(folder: Path, body: str, *words: str, preload: str = "") -> subprocess.Popen[str]:
    main = "if __name__ == '__main__':\n" + textwrap.indent(body or "pass", "    ")
    (folder / "rank.py").write_text(RANK + preload + main)
    command = [sys.executable, "-m", "megatron3d.runtime.local_ranks", str(folder / "rank.py"), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return start(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("", ExitCode.DONE, ""),
        ("sys.exit(3 * rank)", ExitCode.STOPPED, ""),
        ("sys.exit(2) if rank == 1 else wait()", ExitCode.USER_ERROR, ""),
        ("os.kill(os.getpid(), 9) if rank == 1 else wait()", 128 + 9, "> rank 1 was killed by SIGKILL\n"),
    ],
)
def test_exit_codes(tmp_path: Path, body: str, code: int, error: str) -> None:
    began = time.monotonic()
    ranks = launch(tmp_path, body, "02")
    _, err = ranks.communicate(timeout=30)
    assert ranks.returncode == code and re.fullmatch(STARTED + re.escape(error), err), err
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_which_may_take_its_time(tmp_path: Path, number: signal.Signals) -> None:
    ranks = launch(tmp_path, f"signal.signal({int(number)}, stop)\nwait()", "2")
    assert ranks.stdout is not None, "it is piped"
    assert {ranks.stdout.readline() for _ in range(2)} == {"rank 0 of 2 waits\n", "rank 1 of 2 waits\n"}
    ranks.send_signal(number)
    _, err = ranks.communicate(timeout=30)
    assert ranks.returncode == ExitCode.STOPPED and re.fullmatch(STARTED, err), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_the_ranks_start_ends_the_launch(tmp_path: Path, number: signal.Signals) -> None:
    ranks = launch(tmp_path, "", "2", preload="def preload(*_):\n    wait()\n")
    assert ranks.stdout is not None, "it is piped"
    assert ranks.stdout.readline() == "rank -1 of None waits\n"
    ranks.send_signal(number)
    assert ranks.communicate(timeout=30) == ("", "rank.py: stopped; nothing was written\n")
    assert ranks.returncode == 128 + number


def test_ranks_are_programs_of_their_own_with_what_was_imported_before(tmp_path: Path) -> None:
    """Modules are imported once; a module, an environment and a command line are those of a program run by itself."""
    preload = (
        "def preload(argv, num_ranks):\n    import colorsys\n    colorsys.loaded = (os.getpid(), argv, num_ranks)\n"
    )
    body = (
        "import colorsys\n"
        "here = sys.modules['__main__']\n"
        "assert here.__dict__ is globals() and os.path.samefile(here.__file__, sys.argv[0]), here\n"
        "assert colorsys.loaded == (os.getppid(), ['--load', 'x'], 2), colorsys.loaded\n"
        "assert (sys.argv[1:], sys.path[0]) == (['--load', 'x'], os.path.dirname(__file__)), sys.path\n"
        "assert signal.getsignal(signal.SIGINT) == signal.default_int_handler\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not signal.pthread_sigmask(0, [])\n"
        "assert sys.stdout is sys.__stdout__ and os.getpgrp() == os.getpgid(os.getppid())\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS')\n"
        "os.write(1, f'{[os.environ[name] for name in names]}\\n'.encode())\n"
    )
    ranks = launch(tmp_path, body, "2", "--load", "x", preload=preload)
    out, err = ranks.communicate(timeout=30)
    assert ranks.returncode == ExitCode.DONE and re.fullmatch(STARTED, err), err
    assert sorted(out.splitlines()) == [f"{[rank, rank, '2', '2', 'localhost', '1']}" for rank in "01"]


def test_a_failure_is_shown_as_without_the_launcher(tmp_path: Path) -> None:
    ranks = launch(tmp_path, "raise ValueError('nonsense')", "1")
    _, err = ranks.communicate(timeout=30)
    alone = start([sys.executable, str(tmp_path / "rank.py")], stderr=subprocess.PIPE)
    shown = alone.communicate(timeout=30)[1]
    assert "nonsense" in shown and re.fullmatch(STARTED + re.escape(shown), err), err
    assert ranks.returncode == alone.returncode == ExitCode.CRASH


def test_what_a_preload_refuses_no_rank_repeats(tmp_path: Path) -> None:
    preload = "from megatron3d.errors import UserError\ndef preload(*_):\n    raise UserError('no')\n"
    ranks = launch(tmp_path, "print('started')", "2", preload=preload)
    assert ranks.communicate(timeout=30) == ("", "no\n")
    assert ranks.returncode == ExitCode.USER_ERROR


def test_an_error_of_all_ranks_is_printed_once_where_rank_0_is_slow(tmp_path: Path) -> None:
    body = """
        from megatron3d.errors import UserError
        from megatron3d.runtime import process
        def main():
            time.sleep(20 if rank == 0 else 0)
            raise UserError("no")
        sys.exit(process.run_program(main))
        """
    ranks = launch(tmp_path, textwrap.dedent(body), "4")
    _, err = ranks.communicate(timeout=30)
    assert ranks.returncode == ExitCode.USER_ERROR and err.splitlines()[1:] == ["[rank 1] no"], err


@pytest.mark.parametrize("number", ["0", "1025", "9" * 400])
def test_absurd_numbers_are_refused(tmp_path: Path, number: str) -> None:
    ranks = launch(tmp_path, "", number)
    _, err = ranks.communicate(timeout=30)
    assert ranks.returncode == ExitCode.USER_ERROR
    assert err == f"{number} ranks: this launcher starts 1 to 1024 on this machine; use 2, for example\n"


def test_a_port_is_held_until_the_ranks_end() -> None:
    """Rank 0 listens on it, and a second launch, which looks before rank 0 listens, is given another."""
    with reserved_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("localhost", port))
        store = dist.TCPStore("localhost", port, 1, is_master=True, multi_tenant=True)  # type: ignore[attr-defined]
        store.set("key", "value")
        assert store.get("key") == b"value"
