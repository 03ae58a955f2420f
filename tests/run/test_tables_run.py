"""The workflow on jobs that are a line of shell each: order, failures, interruptions, resuming."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from run.launch import Command
from run.presets import PRESETS
from run.tables import __main__ as cli
from run.tables import worker
from run.tables.jobs import Job, chain, fingerprint, write_plan
from run.tables.rows import Options
from run.tables.scale import get_scale
from run.tables.table import failure

pytestmark = pytest.mark.slow

pytest.importorskip("snakemake", reason="pip install -e '.[tables]' brings snakemake")
ROOT = Path(__file__).resolve().parents[2]


def job(out: Path, name: str, *needs: Job, script: str = ":", **settings: str) -> Job:
    """Notes its name in ran.txt, runs `script` in its folder, and makes out.txt."""
    row, kind = name.rsplit(".", 1)

    def build(folder: Path) -> Command:
        text = f"echo {name} >> {out}/ran.txt; {script} && echo made > out.txt"
        return Command(("sh",), "-c", cwd=str(folder), native=(text,))

    return Job(row, kind, out, settings, build, "out.txt", needs=needs,
               preset=PRESETS["cifar10-adm-ogdm"] if kind == "train" else None)  # fmt: skip


def table(out: Path, k: str = "0.1", nfe: str = "10", train_b: str = ":") -> list:
    """Two rows on the same data; b is a fine-tune of a."""
    data = job(out, "digits.data")
    a = job(out, "a.train", data)
    b = job(out, "b.train", data, a, script=train_b, k=k)
    scores = [job(out, f"{name}.score", job(out, f"{name}.sample", train, nfe=nfe), data)
              for name, train in (("a", a), ("b", b))]  # fmt: skip
    return [SimpleNamespace(scores={10: score}) for score in scores]


def run(rows: list, out: Path, jobs: int = 2) -> int:
    return cli.run(Options(1, out=out, scale=get_scale("smoke"), jobs=jobs), rows, [])


def ran(out: Path) -> list[str]:
    file = out / "ran.txt"
    return file.read_text().split() if file.exists() else []


def all_jobs(rows: list) -> dict[str, Job]:
    return {job.name: job for job in chain(j for row in rows for j in row.scores.values())}


def test_jobs_run_once_needs_first_and_a_changed_setting_reruns_what_rests_on_it(tmp_path, capfd):
    rows = table(tmp_path)
    assert run(rows, tmp_path) == 0
    order = ran(tmp_path)
    assert sorted(order) == sorted(all_jobs(rows))
    assert order.index("digits.data") < order.index("a.train") < order.index("b.train")
    assert order.index("b.train") < order.index("b.sample") < order.index("b.score")
    for made in all_jobs(rows).values():
        record = made.record()
        assert record["seconds"] >= 0 and record["commit"] and record["versions"]["snakemake"]
        assert made.name in record["command"] and made.name in (made.folder / "job.log").read_text()
    assert run(rows, tmp_path) == 0 and ran(tmp_path) == order
    assert "0 to do" in capfd.readouterr().err
    assert run(table(tmp_path, k="0.2"), tmp_path) == 0
    assert ran(tmp_path)[len(order) :] == ["b.train", "b.sample", "b.score"]
    order = ran(tmp_path)
    assert run(rows, tmp_path) == 0 and ran(tmp_path) == order  # the old results are found again


@pytest.mark.parametrize("name", ["a: b", "a\nb"])
def test_a_folder_of_results_may_have_any_name(tmp_path, name):
    out = tmp_path / name
    made = Job("a", "score", out, {}, lambda f: Command(("touch",), "out.txt", cwd=str(f)), "out.txt")
    assert run([SimpleNamespace(scores={1: made})], out) == 0 and made.record()


def test_a_folder_of_results_can_be_moved(tmp_path):
    made = job(tmp_path / "a", "digits.data")
    assert worker.main(alone([SimpleNamespace(scores={1: made})], tmp_path / "a")) == 0
    (tmp_path / "a").rename(tmp_path / "b")
    assert job(tmp_path / "b", "digits.data").record() and not made.record()


def test_outputs_that_were_deleted_are_made_again_if_something_needs_them(tmp_path):
    rows = table(tmp_path)
    assert run(rows, tmp_path) == 0
    before, jobs = len(ran(tmp_path)), all_jobs(rows)
    for name, made in jobs.items():
        if "score" not in name:
            made.output.unlink()
    assert run(rows, tmp_path) == 0 and len(ran(tmp_path)) == before  # inputs of finished jobs
    jobs["a.score"].output.unlink()
    assert run(rows, tmp_path) == 0
    assert ran(tmp_path)[before:] == ["digits.data", "a.train", "a.sample", "a.score"]


def test_a_failed_job_stops_its_row_is_named_and_tried_again(tmp_path):
    rows = table(tmp_path, train_b="echo went wrong; test -f ../../mended")
    assert run(rows, tmp_path) == 1
    assert sorted(ran(tmp_path)) == ["a.sample", "a.score", "a.train", "b.train", "digits.data"]
    found = failure(chain(rows[1].scores.values(), pending=True))
    assert found["job"] == "b.train" and found["status"] == "failed"
    assert "exit status 1; see" in found["reason"]
    assert "went wrong" in Path(found["log"]).read_text()
    assert failure(chain(rows[0].scores.values(), pending=True)) is None
    (tmp_path / "mended").touch()
    before = len(ran(tmp_path))
    assert run(rows, tmp_path) == 0
    assert ran(tmp_path)[before:] == ["b.train", "b.sample", "b.score"]
    assert not list(tmp_path.glob("stages/*/state.json"))


def test_a_training_that_ends_well_and_early_is_continued(tmp_path):
    """Lightning exits with 0 when it is told to end."""
    script = tmp_path / "main.py"
    script.write_text(
        "import os, sys, torch\nos.makedirs('runs/a/checkpoints', exist_ok=True)\n"
        "step = 3 if '-r' in sys.argv else 1\n"
        "torch.save({'global_step': step}, 'runs/a/checkpoints/last.ckpt')\n"
    )
    flags = {"lightning.trainer.max_steps": 3}
    train = Job("a", "train", tmp_path, {}, lambda folder: Command(
        (sys.executable,), str(script), flags, cwd=str(folder)), "model.ckpt",
        output_glob="runs/*/checkpoints/last*.ckpt", preset=PRESETS["lsun-church-ldm-baseline"],
    )  # fmt: skip
    rows = [SimpleNamespace(scores={10: train})]
    assert run(rows, tmp_path) == 1
    assert "was ended 2 steps early" in failure(chain([train], pending=True))["reason"]
    assert run(rows, tmp_path) == 0 and train.record()


def test_the_time_left_is_told_once_every_kind_has_run(tmp_path):
    rows = table(tmp_path)
    jobs = chain(score for row in rows for score in row.scores.values())
    plan = json.loads(write_plan(tmp_path, "x", jobs, lambda job: {}, 2).read_text())
    assert worker.seconds_left(plan) == 0
    seconds = {"digits.data": 1, "a.train": 30, "a.sample": 4, "a.score": 2}
    for made in jobs:
        if made.name in seconds:
            made.folder.mkdir(parents=True)
            made.marker.write_text(json.dumps({"seconds": seconds[made.name]}))
    assert worker.seconds_left(plan) == (30 + 4 + 2) / 2
    assert worker.seconds_left(plan | {"at_a_time": 0}) == 0


def alone(rows: list, out: Path) -> list[str]:
    """The arguments of run.tables.worker for the last job of `rows`, whose needs have none."""
    (goal,) = rows[-1].scores.values()
    plan = write_plan(out, "table1", chain([goal]), lambda job: {})
    return [str(plan), goal.folder.name]


@pytest.mark.parametrize(
    ("script", "reason"),
    [(("sh", "true"), "out.txt"), (("no-such-program", ""), "no-such-program")],
)
def test_a_command_that_makes_nothing_or_does_not_exist_has_failed(tmp_path, script, reason):
    command = Command(script[:1], "-c", native=script[1:])
    empty = Job("a", "score", tmp_path, {}, lambda _: command, "out.txt")
    assert worker.main(alone([SimpleNamespace(scores={1: empty})], tmp_path)) == 1
    assert reason in empty.state()["reason"] and empty.record() is None


def test_the_newest_match_becomes_the_output_and_single_images_go(tmp_path):
    text = "echo 1 > ema_1.pt; sleep 0.02; echo 2 > ema_2.pt; mkdir images; touch images/x"

    def build(folder: Path) -> Command:
        return Command(("sh",), "-c", cwd=str(folder), native=(text,))

    made = Job("a", "sample", tmp_path, {}, build, "model.pt", "ema_*.pt")
    assert worker.main(alone([SimpleNamespace(scores={1: made})], tmp_path)) == 0
    assert made.output.read_text() == "2\n" and not (made.folder / "images").exists()


def start(tmp_path: Path, script: str) -> subprocess.Popen:
    """A run of one training in a process of its own, once its command runs."""
    code = (
        "import sys; from pathlib import Path; \n"
        "from tests.run.test_tables_run import job, run, SimpleNamespace\n"
        f"train = job(Path(sys.argv[1]), 'a.train', script={script!r})\n"
        "sys.exit(run([SimpleNamespace(scores={10: train})], Path(sys.argv[1])))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT,
                               env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    for _ in range(600):
        if list(tmp_path.glob("stages/*/begun")):
            return process
        time.sleep(0.1)
    raise AssertionError("the job did not begin")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_commands_and_the_next_run_continues(tmp_path, number):
    process = start(tmp_path, "touch begun; test -f ../../go || sleep 600")
    process.send_signal(number)
    assert process.wait(60) == 130
    (state,) = tmp_path.glob("stages/*/state.json")
    assert json.loads(state.read_text())["status"] == "stopped"
    (tmp_path / "go").touch()
    train = job(tmp_path, "a.train", script="touch begun; test -f ../../go || sleep 600")
    assert run([SimpleNamespace(scores={10: train})], tmp_path) == 0
    assert ran(tmp_path) == ["a.train", "a.train"]


def test_a_command_that_misses_the_signal_is_ended_with_its_children(tmp_path):
    code = (
        "import signal, sys\nfrom pathlib import Path\nfrom run.tables import worker\n"
        "worker.GRACE = 1\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "command = worker.Command(('sh', '-c'), 'sleep 600; :', cwd=sys.argv[1])\n"
        "worker.call(command, Path(sys.argv[1], 'job.log'), 2)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT,
                               env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    for _ in range(600):
        family = [psutil.Process(pid) for pid in worker.family(process.pid)[1:]]
        if len(family) == 2:  # sh and sleep
            break
        time.sleep(0.1)
    process.terminate()  # this process alone
    process.wait(30)
    assert len(family) == 2 and not psutil.wait_procs(family, 10)[1]


def test_nothing_is_lost_or_done_twice_when_everything_but_the_command_is_killed(tmp_path):
    """kill -9 of the engine and of the job's process; the command goes on, and holds the lock."""
    script = "touch begun; sleep 4; test -f ../../go"
    process = start(tmp_path, script)
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_text().split("\0")
            if any(str(tmp_path) in word for word in words) and words[:2] != ["sh", "-c"]:
                os.kill(int(file.parent.name), signal.SIGKILL)
    process.wait()
    (tmp_path / "go").touch()
    began = time.monotonic()
    train = job(tmp_path, "a.train", script=script)
    assert run([SimpleNamespace(scores={10: train})], tmp_path) == 0
    assert time.monotonic() - began > 4, "the second attempt came while the first one's ran"
    assert train.record() and ran(tmp_path) == ["a.train", "a.train"]


def test_a_file_is_told_by_its_content_and_a_long_one_by_its_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("run.tables.jobs.WHOLE", 100)
    for size in (3, 3 << 20):
        file = tmp_path / "big"
        file.write_bytes(bytes(size))
        before = fingerprint(str(file))
        (tmp_path / "copy").write_bytes(bytes(size))
        assert fingerprint(str(tmp_path / "copy")) == before
        file.write_bytes(bytes(size) + b"x")
        assert fingerprint(str(file)) != before
    assert fingerprint("https://host/model.pkl") == "https://host/model.pkl"
