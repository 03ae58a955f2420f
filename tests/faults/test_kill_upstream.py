"""Upstream's trainers with --ogdm, sent signals at random moments and continued: they end as if never stopped."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.adm.test_upstream import MODEL, OGDM, TRAIN, same_files
from tests.adm.test_upstream import data as data  # a fixture
from tests.core.toys import differences
from tests.edm import edm_tiny
from tests.ldm import ldm_tiny
from tests.ldm.test_train import STATE, load

TESTS = Path(__file__).resolve().parents[1]
SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT)


def last(folder: Path, pattern: str) -> Path | None:
    """The file with the highest number in its name."""
    return max(folder.rglob(pattern), key=lambda p: int(re.findall(r"\d+", p.name)[-1]), default=None)


class Adm:
    name, steps = "guided-diffusion", 30

    def __init__(self, folder: Path, data: Path):
        self.folder, self.data = folder, data

    def command(self) -> list:
        flags = ["--data_dir", str(self.data), *MODEL, *TRAIN, *OGDM, "--lr_anneal_steps", str(self.steps)]
        flags += ["--save_interval", "4"]
        if seal := last(self.folder, "ogdm*.pt"):
            flags += ["--resume_checkpoint", str(seal.with_name(seal.name.replace("ogdm", "model")))]
        job = {"script": "image_train.py", "argv": flags, "out": str(self.folder), "seed": 1}
        return [TESTS / "adm" / "test_upstream.py", "drive", json.dumps([job])]

    def begun(self) -> bool:
        return last(self.folder, "ogdm*.pt") is not None

    def check(self, whole: "Adm") -> None:
        end = f"{self.steps:06d}.pt"
        same_files(self.folder, whole.folder, f"model{end}", f"ema*{end}", f"opt{end}", f"ogdm{end}")


class Edm:
    name = "edm"

    def __init__(self, folder: Path, data: Path):
        self.folder, self.data = folder, data

    def command(self) -> list:
        flags = [*edm_tiny.TINY, *edm_tiny.OGDM, f"--data={self.data}", "--batch=50", "--seed=1", "--duration=0.008"]
        seal = last(self.folder, "ogdm-state-*.pt")
        more = [f"--resume={seal.with_name(seal.name.replace('ogdm', 'training'))}"] if seal else []
        return ["train.py", *flags, f"--outdir={self.folder}", *more]

    def begun(self) -> bool:
        return last(self.folder, "ogdm-state-*.pt") is not None

    def check(self, whole: "Edm") -> None:
        same_edm_states(self.where, self.folder, whole.folder, 8)


def same_edm_states(where: Path, a: Path, b: Path, kimg: int) -> None:
    state = "import sys; sys.path.insert(0, '.'); from ogdm_core.edm import compat; compat.install()\n"
    state += "from pathlib import Path; from tests.edm import edm_tiny; from tests.core.toys import differences\n"
    state += f"a, b = (edm_tiny.state(Path(f), {kimg}) for f in sys.argv[1:])\n"
    state += "skip = ('/ogdm/tick', '/ogdm/images')\n"
    state += "assert len(a) > 50; print([n for n in a if n not in skip and differences(a[n], b[n])])"
    line = [sys.executable, "-c", state, a, b]
    done = subprocess.run(line, cwd=where, env=environment(where), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr[-2000:]


class Ldm:
    name = "latent-diffusion"

    def __init__(self, folder: Path, data: Path):
        self.folder = folder
        config = ldm_tiny.config(ogdm={"gamma": None})
        config["lightning"]["callbacks"]["image_logger"]["params"]["disabled"] = True
        (folder / "tiny.yaml").write_text(yaml.safe_dump(config))

    def command(self) -> list:
        always = ["main.py", "--trust", "-t", "True", "--scale_lr", "False", "--max_steps", "60"]
        found = next(self.folder.glob("logs/*/checkpoints/last.ckpt"), None)
        return [
            *always,
            *(["-r", found] if found else ["--base", self.folder / "tiny.yaml", "-l", self.folder / "logs"]),
        ]

    def begun(self) -> bool:
        return any(self.folder.glob("logs/*/checkpoints/last.ckpt"))

    def check(self, whole: "Ldm") -> None:
        a, b = (load(next(run.folder.glob("logs/*"))) for run in (self, whole))
        assert a["global_step"] == 60 and [key for key in STATE if differences(a[key], b[key])] == []


def environment(where: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (where, TESTS.parent, TESTS / "edm", TESTS / "ldm")))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.faults)])
@pytest.mark.parametrize("backbone", [Adm, Edm, Ldm])
def test_upstream_trainers_end_as_if_never_stopped(patched, data, tmp_path, backbone, times):
    where = patched(backbone.name)
    images = edm_tiny.digits(tmp_path / "digits-8x8.zip") if backbone is Edm else data
    runs, log, draw, took = [], tmp_path / "log", random.Random(0), 0.0
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        runs.append(backbone(tmp_path / name, images))
        runs[-1].where = where

    def start(run) -> subprocess.Popen:
        line = [sys.executable, *map(str, run.command())]
        with log.open("a") as file:
            return subprocess.Popen(line, cwd=where, env=environment(where), stdout=file, stderr=file)

    for number in [SIGNALS[i % len(SIGNALS)] for i in range(times)]:
        with start(runs[1]) as process:
            began = time.monotonic()
            time.sleep(draw.uniform(0.5, 1.3) * took)  # of later starts: while it starts, or trains
            while not runs[1].begun() and process.poll() is None and time.monotonic() < began + 900:
                time.sleep(0.02)
            took = took or time.monotonic() - began
            process.send_signal(number)
            assert runs[1].begun() and process.wait(300) in (130, 0, 1, -number), log.read_text()[-3000:]
    for run in runs:
        assert start(run).wait(1200) == 0, log.read_text()[-3000:]
    runs[1].check(runs[0])
