"""A Slurm of two nodes on this machine, for as long as a test needs it.

Debian's `slurm-wlm` and `munge`, as root, without accounting: `munged`, `slurmctld`, and one
`slurmd` per node. slurm.conf is in its standard place, since Snakemake's plugin drops SLURM_CONF.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

CONF, MUNGE = Path("/etc/slurm/slurm.conf"), Path("/run/munge")
OURS = "# Written by tests/cluster, and removed by it."
NODES = ("node1", "node2")
TEXT = """{ours}
ClusterName=ogdm
SlurmctldHost={host}
SlurmUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MinJobAge=300
SlurmctldParameters=enable_configless
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why no Slurm can be started here, and what to do; empty if one can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd") if not program(name)]
    if absent:
        return f"there is no {', '.join(absent)}; apt-get install slurm-wlm munge brings them"
    if os.geteuid():
        return "Slurm's daemons are started as root here, and this is another user"
    if CONF.exists() and OURS not in CONF.read_text():
        return f"{CONF} belongs to a Slurm of this machine's own"
    return ""


def program(name: str) -> str | None:
    """The path of a daemon, which may be outside of a user's PATH."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """The daemons, started on entry and ended on exit."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []

    def __enter__(self) -> Slurm:
        host = socket.gethostname()
        size = f"CPUs={os.cpu_count()} RealMemory={os.sysconf('SC_PHYS_PAGES') * 4096 >> 20}"
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={17001 + i} {size}"
            for i, name in enumerate(NODES)
        )
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        CONF.write_text(TEXT.format(ours=OURS, host=host, folder=self.folder, nodes=nodes))
        MUNGE.mkdir(exist_ok=True)
        subprocess.run(["chown", "-R", "munge:munge", MUNGE], check=True)
        self._start("runuser", "-u", "munge", "--", program("munged"), "--foreground", "--force")
        self._start(program("slurmctld"), "-D", "-c")
        for name in NODES:
            self._start(program("slurmd"), "-D", "-N", name)
        for _ in range(120):
            if ask("sinfo", "--noheader", "--format=%T", check=False).split() == ["idle"]:
                return self
            if any(daemon.poll() is not None for daemon in self.daemons):
                break
            time.sleep(0.5)
        self.__exit__()
        logs = [p.read_text()[-1000:] for p in self.folder.glob("*.out")]
        raise RuntimeError("Slurm's nodes did not become idle:\n" + "\n".join(logs))

    def _start(self, *argv: str) -> None:
        log = (self.folder / f"{Path(argv[-1]).name}.out").open("w")
        self.daemons.append(subprocess.Popen(argv, stdout=log, stderr=log))

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        CONF.unlink()


def ask(*argv: str, check: bool = True) -> str:
    """What one of Slurm's commands prints."""
    return subprocess.run(argv, capture_output=True, text=True, check=check).stdout
