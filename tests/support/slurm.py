"""A two-node SLURM cluster on this machine, run as root in its own folder: Debian's slurmctld, slurmd and munged.

The nodes are named 127.0.0.1 and 127.0.0.2, so that the names resolve to addresses like those of real nodes.  Each
node is configured with two GPUs, which torch cannot find.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.tiny_run import ROOT

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "setpriv")
PATH = f"{os.environ['PATH']}:/usr/sbin"
NODES = ("127.0.0.1", "127.0.0.2")
# File of this cluster for tools/make_slurm.py, with two ranks on a node.
CLUSTER = """
name: two nodes of two processes
accelerator: cpu
cores: 2
levels: [{name: node, ranks: 2, gb_s: 1, latency_us: 1}, {name: network, ranks: 4, gb_s: 1, latency_us: 1}]
source: tests
"""
MUNGE_FILES = {
    "key-file": "key",
    "socket": "munge",
    "pid-file": "munged.pid",
    "seed-file": "seed",
    "log-file": "munged.log",
}
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")
# Polls, 0.2 s apart.
PATIENCE = 8
# KillWait: seconds between SIGTERM and SIGKILL.  cred_expire: also the delay before a requeued job starts again.
CONF = """
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName={nodes[0]} Port={ports[1]} CPUs=32 Gres=gpu:2 State=UNKNOWN
NodeName={nodes[1]} Port={ports[2]} CPUs=32 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why SLURM cannot run here, or an empty string."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if absent:
        return f"SLURM is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge, as scripts/test.sh does"
    return "" if os.geteuid() == 0 else "SLURM's daemons are started as root"


@dataclass(frozen=True)
class Job:
    """State of a job as SLURM reports it."""

    state: str
    code: int
    num_requeues: int


class Slurm:
    """A SLURM cluster that runs from `start` until `close`; its daemons end with this process in any case."""

    def __init__(self, folder: Path) -> None:
        socket_path = folder / NODES[0] / f"{NODES[0]}_99.4294967295.0"
        assert len(str(socket_path)) < 108, f"{folder}: too long for the sockets of job steps, which then never start"
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = os.environ | {
            "PATH": PATH,
            "SLURM_CONF": f"{folder}/slurm.conf",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self) -> None:
        """Start the daemons and wait until jobs can run."""
        folder = self._folder
        (folder / "state").mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o400)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=free_ports(3), nodes=NODES))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        files = (f"--{name}={folder}/{file}" for name, file in MUNGE_FILES.items())
        self._start("munged", "--foreground", "--force", *files)
        self.until(lambda: (folder / "munge").exists(), self._log)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self.until(lambda: self._run("sinfo", "-h", "-o", "%T").split() == ["idle"], self._log, 30)

    def _start(self, *command: str) -> None:
        with (self._folder / "daemons.log").open("ab") as log:
            typed = ["setpriv", "--pdeathsig", "KILL", *command]
            self._daemons.append(subprocess.Popen(typed, env=self.environ, stdout=log, stderr=log))

    def _log(self) -> str:
        return (self._folder / "daemons.log").read_text()[-3000:]

    def until(self, holds: Callable[[], bool], otherwise: Callable[[], str], timeout_s: float = 300) -> None:
        """Wait until a condition holds; on timeout raise AssertionError with diagnostics."""
        end = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end, otherwise()
            time.sleep(0.2)

    def _run(self, *command: str) -> str:
        return subprocess.run(command, env=self.environ, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout

    def run(self, *command: str, **environ: str) -> str:
        """Run a SLURM command or a script that calls some; return its output and require exit code 0."""
        done = subprocess.run(command, env=self.environ | environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, number: str) -> Job:
        """Return the state of a job."""
        said = self.run("scontrol", "show", "job", "-o", number)
        facts = dict(re.findall(r"(JobState|ExitCode|Restarts)=(\S+)", said))
        return Job(facts["JobState"], int(facts["ExitCode"].partition(":")[0]), int(facts["Restarts"]))

    def elapsed_min(self, number: str) -> int:
        """Return the full minutes since a job last started."""
        hours, minutes = re.findall(r"RunTime=(\d+):(\d+):", self._run("scontrol", "show", "job", number))[0]
        return 60 * int(hours) + int(minutes)

    def wait(self, number: str) -> Job:
        """Wait until a job has ended for good and return its state; one about to be requeued looks ended briefly."""
        seen: list[Job] = []

        def is_over() -> bool:
            seen.append(self.job(number))
            return seen[-PATIENCE:] == PATIENCE * [seen[-1]] and seen[-1].state not in UNFINISHED

        self.until(is_over, lambda: f"job {number}: {seen[-1]}")
        return seen[-1]

    def close(self) -> None:
        """Cancel all jobs, then stop the daemons, newest first."""
        self._run("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            self.until(lambda: not self._run("squeue", "-h"), self._log, 15)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def free_ports(count: int) -> list[int]:
    """Return free ports of this machine."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("localhost", 0))
        return [probe.getsockname()[1] for probe in probes]
