"""A run's folder and the end of a run: `ogdm_core.folder`, and the trainer for diffusers models by it."""

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ogdm_core import OGDMConfig, folder, sealed
from ogdm_core.diffusers import __main__ as trainer
from ogdm_core.diffusers import train
from ogdm_core.edm import train as train_edm
from ogdm_core.images import ImageError
from tests.core.toys import differences
from tests.edm.test_train import Loss, Net, options

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--data", "digits", "--channels", "8,8", "--batch-size", "4", "--steps", "8", "--log-every", "4"]
OGDM = ["--ogdm", "--ogdm-d-kind", "light"]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def python(code: str, *args: object, **options) -> subprocess.Popen:
    line = [sys.executable, "-c", f"import os, signal, sys, time\nfrom ogdm_core import folder\n{code}"]
    return subprocess.Popen([*line, *map(str, args)], env=ENV, text=True, **options)


# ---- one trainer per folder ---------------------------------------------------------------------

# With a data worker, so to say; one write per process, since both write at once.
HOLD = "folder.claim(sys.argv[1])\npid = os.fork()\nos.write(1, b'%d\\n' % pid)\ntime.sleep(600)"


def test_a_second_trainer_names_the_first_and_stops(tmp_path, capsys):
    holder = python(HOLD, tmp_path, stdout=subprocess.PIPE)
    worker = int(holder.stdout.readline()) or int(holder.stdout.readline())  # parent and child both print
    try:
        with pytest.raises(SystemExit) as end:
            trainer.main(["--output", str(tmp_path), *TINY])
        words = f"error: process {holder.pid} on {socket.gethostname()} is training in {tmp_path}; wait"
        assert str(end.value.code).startswith(words) and not (tmp_path / "checkpoint.pt").exists()
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # lives on, and keeps nobody out
        assert trainer.main(["--output", str(tmp_path), *TINY, "--steps", "1"]) == 0
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)


def test_partial_files_of_dead_processes_are_removed(tmp_path):
    dead = python("")
    dead.wait()
    names = [f".a.pt.{dead.pid}.part", f".b.pt.{os.getppid()}.part", ".c.part", f"d.{dead.pid}.part"]
    for name in names:
        (tmp_path / name).touch()
    folder.claim(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([folder.LOCK, *names[1:]])


def test_a_folder_without_locks_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    def none(*args):
        raise OSError("Function not implemented")

    monkeypatch.setattr(folder, "take", none)
    folder.claim(tmp_path)
    assert "has no lock (Function not implemented)" in capsys.readouterr().out
    folder.claim("gs://bucket/run")


def test_ranks_with_other_settings_end_together(monkeypatch, tmp_path):
    settings = {"steps": 4, "gamma": 0.1, "data": "digits"}
    folder.agree(settings)
    monkeypatch.setattr(
        folder, "gather", lambda mine: [mine, mine, mine | {"gamma": 5.0, "ogdm.gamma": 5.0, "steps": 7}]
    )
    words = "rank 2 has other settings than rank 0: steps: 4 there, 7 here; gamma: 0.1 there, 5.0 here; give all ranks"
    with pytest.raises(SystemExit, match=words):
        folder.agree(settings)
    assert "rank 2 has other settings than rank 0: ogdm.gamma: None there, 5.0 here" in options("--ogdm")[1].output
    monkeypatch.setattr(train.folder, "agree", lambda settings: {}[settings["steps"]])
    with pytest.raises(KeyError, match="8"):  # it is called with what a run is known by
        trainer.main(["--output", str(tmp_path / "out"), *TINY])


@pytest.mark.slow
def test_two_ranks_with_other_settings_end_together(tmp_path):
    """Rows 15 and 27: another gamma, another number of steps."""
    words = [sys.executable, "-m", "ogdm_core.diffusers", "--output", str(tmp_path / "out"), *TINY, *OGDM]
    own = 'if [ "$RANK" = 1 ]; then set -- "$@" --ogdm-gamma 5 --steps 7; fi; exec "$@"'
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    line = [*launcher, "sh", "-c", own, "sh", *words, "--ogdm-gamma", "0.1"]
    job = subprocess.Popen(line, env=ENV, stderr=subprocess.PIPE, text=True)
    try:
        printed = job.communicate(timeout=300)[1]
    finally:
        job.terminate()  # and, by the launcher, both ranks
    assert job.returncode == 1, printed[-3000:]
    (said,) = [text for text in printed.splitlines() if text.startswith("error: ")]
    assert "rank 1 has other settings than rank 0: " in said and said.endswith("give all ranks the same command")
    assert "steps: 8 there, 7 here" in said and "'gamma': 5.0" in said, said
    assert not (tmp_path / "out").exists()


# ---- which data ---------------------------------------------------------------------------------


def test_data_is_known_by_names_sizes_and_what_archives_hold(tmp_path):
    assert folder.fingerprint("digits") == ""
    (tmp_path / "images" / "a").mkdir(parents=True)
    seen = set()
    for name, content in (("a/1.png", "x"), ("a/1.png", "xy"), ("2.png", "x"), (".hidden", "x")):
        (tmp_path / "images" / name).write_text(content)
        seen.add(folder.fingerprint(tmp_path / "images"))
    assert len(seen) == 3 and {words.split(",")[0] for words in seen} == {"1 files", "2 files"}
    for value in (0, 1):
        np.savez(tmp_path / "a.npz", np.full((4, 8, 8, 1), value, np.uint8))
        seen.add(folder.fingerprint(tmp_path / "a.npz"))
    assert len(seen) == 5


def test_ldm_knows_its_data_by_upstreams_list_of_files(tmp_path):
    resume_ldm = pytest.importorskip("ogdm_core.ldm.resume")

    class Listed(torch.utils.data.Dataset):
        labels = {"file_path_": [str(tmp_path / name) for name in ("a.png", "b.png")]}

        def __len__(self):
            return 2

    (tmp_path / "a.png").write_text("x")
    below = type("Below", (Listed,), {"labels": None, "data": Listed()})()  # as upstream's ImageNet
    kinds = [Listed(), torch.utils.data.Subset(Listed(), [0, 1]), below]
    seen = []
    for content in ("x", "xy", None):  # of b.png; None: it is not there
        (tmp_path / "b.png").write_text(content) if content else (tmp_path / "b.png").unlink()
        (known,) = set(map(resume_ldm.known_by, kinds))
        seen.append(known)
    assert len(set(seen)) == 3 and all(known.startswith("2 files, ") for known in seen)
    (tmp_path / "b.png").write_text("x")
    shutil.copytree(tmp_path, tmp_path / "moved")
    Listed.labels = {"file_path_": [str(tmp_path / "moved" / name) for name in ("a.png", "b.png")]}
    assert resume_ldm.known_by(Listed()) == seen[0]
    assert resume_ldm.known_by(torch.utils.data.TensorDataset(torch.zeros(3))) == "3 images"


def test_other_data_under_the_same_name_is_named(tmp_path, capsys):
    path, out = tmp_path / "a.npz", ["--output", str(tmp_path / "out"), *TINY]
    for count, steps in ((8, 1), (8, 2), (9, 3)):
        np.savez(path, np.full((count, 8, 8, 1), 7, np.uint8))
        trainer.main([*out, "--data", str(path), "--steps", str(steps)])
        said = capsys.readouterr().out
        assert ("continuing with other settings: images: 1 files, " in said) is (steps == 3)


def test_edms_session_keeps_a_second_one_out_and_names_other_data(tmp_path, capsys):
    path, net = tmp_path / "a.npz", Net()

    def session() -> train_edm.Session:
        optimizer, config = torch.optim.Adam(net.parameters()), OGDMConfig(d_width=0.02).to_dict()
        made = train_edm.session(
            config, net, net, Loss(), optimizer, 0, None, None, 10, str(tmp_path / "run"), str(path)
        )
        made.stop.forget()
        return made

    (tmp_path / "run").mkdir()
    np.savez(path, np.zeros((4, 8, 8, 1), np.uint8))
    holder = python(HOLD, tmp_path / "run", stdout=subprocess.PIPE)
    worker = int(holder.stdout.readline()) or int(holder.stdout.readline())
    try:
        with pytest.raises(SystemExit, match=f"error: process {holder.pid} on .* is training in"):
            session()
    finally:
        holder.kill()
        holder.wait()
        os.kill(worker, signal.SIGKILL)
    first = session()
    torch.save({}, tmp_path / "run" / "training-state-000002.pt")  # upstream's files
    (tmp_path / "run" / "network-snapshot-000002.pkl").write_bytes(pickle.dumps({}))
    first.save(nimg=2000, tick=1, every=1, done=False)
    state = train_edm.load_state({}, str(tmp_path / "run" / "training-state-000002.pt"))
    for value in (0, 1):
        np.savez(path, np.full((4, 8, 8, 1), value, np.uint8))
        session().resume(state)
        assert ("the data has changed since the checkpoint: 1 files, " in capsys.readouterr().out) is bool(value)


# ---- checkpoints --------------------------------------------------------------------------------


def test_the_checkpoint_before_the_last_one_is_kept_and_offered(tmp_path, refused):
    out = ["--output", str(tmp_path), *TINY, "--save-every", "2"]
    trainer.main([*out, "--steps", "6"])
    before = tmp_path / "checkpoint.previous.pt"
    assert torch.load(before, weights_only=True)["step"] == 4
    (tmp_path / "checkpoint.pt").write_bytes(b"PK cut short")
    with refused(f"checkpoint.pt is damaged.*the checkpoint before it is {before}, which can take its place"):
        trainer.main(out)
    before.rename(tmp_path / "checkpoint.pt")
    assert trainer.main(out) == 0


def test_weights_that_grow_without_end_replace_no_checkpoint(tmp_path):
    """What diverges need not be NaN: weights of 1e30 are finite."""
    out = ["--output", str(tmp_path), *TINY, *OGDM]
    trainer.main([*out, "--steps", "2"])
    good = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit) as end:
        trainer.main([*out, "--lr", "1e30", "--steps", "9", "--save-every", "3", "--log-every", "50"])
    assert "at step 3 the denoiser's weights reach 1e+30, and" in end.value.code
    assert (tmp_path / "checkpoint.pt").read_bytes() == good


@pytest.mark.parametrize("change, words", [
    ({"format": 2}, "ogdm.pt has format 2, and this version reads up to 1"),
    ({"nimg": -5}, "ogdm.pt is at nimg -5"), ({"updates": -1}, "ogdm.pt is at updates -1"),
])  # fmt: skip
def test_states_that_cannot_be_read_are_refused(tmp_path, change, words):
    torch.save({}, tmp_path / "model.pt")
    checkpoint = sealed.Checkpoint(str(tmp_path), ["model.pt"], "ogdm.pt")
    checkpoint.save({"nimg": 1, "updates": 1})
    state = checkpoint.read()
    sealed.save(f"{tmp_path}/ogdm.pt", state | change)
    with pytest.raises(ValueError, match=words):
        checkpoint.read()


@pytest.mark.parametrize("change, words", [
    ({"format": 2}, "error: the checkpoint has format 2, and this version reads up to 1; continue another one"),
    ({"batches": -1}, "error: the checkpoint is at batches -1"),
])  # fmt: skip
def test_ldms_checkpoints_that_cannot_be_read_are_refused(change, words):
    callback = pytest.importorskip("ogdm_core.ldm.resume").ExactResume()
    callback.load_state_dict({"format": 1, "batches": 0})
    with pytest.raises(SystemExit, match=words):
        callback.load_state_dict({"format": 1, "batches": 0} | change)


# ---- a run that ends before its time ------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole")
    assert trainer.main(["--output", str(out), *TINY, *OGDM]) == 0
    return out


def same(a: Path, b: Path) -> None:
    """Weights, averages, optimisers, D and the log are equal to the bit."""
    one, two = (torch.load(f / "checkpoint.pt", weights_only=True) for f in (a, b))
    assert [name for name in one if differences(one[name], two[name])] == []
    assert (a / "log.jsonl").read_text() == (b / "log.jsonl").read_text()


def at_step(step: int, act) -> type:
    """Images that do something when the batch of a step is asked for."""
    batch, calls = train.data_sets.Images.batch, []

    def acting(self, index):
        calls.append(1)
        if len(calls) == step:
            act()
        return batch(self, index)

    return acting


class Files:
    """Four images, of which the third one is gone."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return i if i != 2 else len((folder.Path("gone") / "c.png").read_bytes())


def _file_of(images: Files, i: int) -> str:
    return f"gone/{'abcd'[i]}.png"


WHY = "gone/c.png cannot be read ([Errno 2] No such file or directory: 'gone/c.png')"


@pytest.mark.parametrize("workers", [None, "fork", "spawn"])
def test_a_batch_that_cannot_be_read_ends_the_run_after_its_step(workers, capsys):
    images = folder.Named(Files(), _file_of)
    more = {"num_workers": 1, "multiprocessing_context": workers} if workers else {}
    stop = folder.Stop()
    batches = folder.Ahead(iter(torch.utils.data.DataLoader(images, **more)), stop, count=2)
    assert [next(batches).item(), next(batches).item()] == [0, 1] and not stop.together()
    batches.look()
    assert stop.together() and stop.failure == WHY
    with pytest.raises(SystemExit, match="^1$"):
        stop.leave("at step 1; --resume continues")
    assert capsys.readouterr().err == f"error: {WHY}; stopped at step 1; --resume continues\n"


def test_a_first_batch_that_cannot_be_read_ends_the_run_before_it(capsys):
    batches = folder.Ahead(map(folder.Named(Files(), _file_of).__getitem__, [2]), folder.Stop())
    with pytest.raises(SystemExit, match="^1$"):
        next(batches)
    assert capsys.readouterr().err == f"error: {WHY}; stopped before the first step of this start; nothing was saved\n"


def test_rank_0_says_what_another_rank_could_not_read(monkeypatch, capsys):
    monkeypatch.setattr(folder, "gather", lambda mine: [mine, WHY])
    with pytest.raises(SystemExit, match="^1$"):
        folder.Stop().leave("at step 3")
    assert capsys.readouterr().err == f"error: {WHY}; stopped at step 3\n"


def test_edm_looks_at_no_batch_behind_the_last_step(tmp_path):
    net = Net()
    session = train_edm.Session(OGDMConfig(d_width=0.02), net, net, Loss(), torch.optim.Adam(net.parameters()))
    session.ahead(iter([1]), rounds=2)
    assert session.stopping(done=True) and not session.stopped
    assert session.stopping(done=False) and session.stopped and session.stop.failure == "StopIteration"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_costs_no_step_and_no_number(tmp_path, monkeypatch, whole, number, capsys):
    out = ["--output", str(tmp_path), *TINY, *OGDM]
    monkeypatch.setattr(train.data_sets.Images, "batch", at_step(6, lambda: os.kill(os.getpid(), number)))
    assert trainer.main(out) == 130 and "stopped at step 6; the same command continues" in capsys.readouterr().out
    monkeypatch.undo()
    assert trainer.main(out) == 0
    same(whole, tmp_path)


@pytest.mark.parametrize("error", [ImageError("x.png cannot be read"), RuntimeError("another rank has gone")])
def test_an_error_costs_no_step_and_no_number(tmp_path, monkeypatch, whole, error):
    def fail():
        raise error

    out = ["--output", str(tmp_path), *TINY, *OGDM]
    monkeypatch.setattr(train.data_sets.Images, "batch", at_step(6, fail))
    with pytest.raises((SystemExit, RuntimeError)):
        trainer.main(out)
    monkeypatch.undo()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 5
    assert trainer.main(out) == 0
    same(whole, tmp_path)


def test_a_step_that_is_half_done_is_not_saved(tmp_path, monkeypatch):
    def fail(self, scale):
        raise RuntimeError("in D's step")

    monkeypatch.setattr(train.Observer, "step", fail)
    with pytest.raises(RuntimeError, match="in D's step"):
        trainer.main(["--output", str(tmp_path), *TINY, *OGDM])
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_second_signal_ends_at_once_and_a_worker_hears_none():
    stop = folder.Stop().listen()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked and stop.together()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        stop._pid += 1
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        stop.forget()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Lost:
    """A stdout without a descriptor whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        self.write("")


PRINTS = """folder.outlive_output()
for i in range(3000):
    print("step", i, flush=True)
    print("step", i, file=sys.stderr)
    time.sleep(0.001)
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("kind", ["disk full", "reader gone"])
def test_a_lost_output_ends_no_run(tmp_path, kind):
    if kind == "disk full":
        with open("/dev/full", "w") as full:
            process = python(PRINTS, tmp_path / "done", stdout=full, stderr=full)
    else:
        process = python(PRINTS, tmp_path / "done", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout.readline() == "step 0\n"
        process.stdout.close()
    assert process.wait(120) == 0 and (tmp_path / "done").read_text() == "done"


def test_a_lost_output_ends_no_training(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Lost())
    assert trainer.main(["--output", str(tmp_path), *TINY, "--steps", "1"]) == 0
    monkeypatch.setattr(sys, "stdout", Lost())
    net, config, run = Net(), OGDMConfig(d_width=0.02).to_dict(), str(tmp_path / "edm")
    made = train_edm.session(config, net, net, Loss(), torch.optim.Adam(net.parameters()), 0, None, None, 1, run, "")
    made.stop.forget()


# ---- kill loops ---------------------------------------------------------------------------------

LOOP = ["--data", "digits", "--channels", "8,8", "--batch-size", "4", *OGDM, "--save-every", "5", "--log-every", "7"]


def few(*case):
    """A case with one signal, and with twenty under --faults."""
    return [pytest.param(*case, 1, id=f"{case[0]}-1"),
            pytest.param(*case, 20, id=f"{case[0]}-20", marks=pytest.mark.faults)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, times", [
    case for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") for case in few(name)
])  # fmt: skip
def test_diffusers_ends_as_if_never_stopped(tmp_path, name, times):
    steps = ["--steps", str(20 + 60 * times)]
    assert trainer.main(["--output", str(tmp_path / "whole"), *LOOP, *steps]) == 0
    line = [sys.executable, Path(__file__).with_name("kill_loop.py"), name, str(times), "0", tmp_path / "killed"]
    done = subprocess.run([*line, *LOOP, *steps], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1]) > times / 4  # starts that had something to continue
    same(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").rglob(".*.part"))


def test_a_lost_output_without_a_descriptor_leaks_none(monkeypatch):
    lost = Lost()
    monkeypatch.setattr(sys, "stdout", lost)
    folder.outlive_output()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert lost.write("step") == 4
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("signalled", [True, False])
def test_ctrl_c_that_ends_data_workers_is_no_failure_of_the_data(signalled):
    stop = folder.Stop()

    def batches():
        yield 1
        stop.asked = signalled
        raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly")

    ahead = folder.Ahead(batches(), stop)
    assert next(ahead) == 1
    ahead.look()
    assert bool(stop.failure) != signalled and stop.together()
    stop.failure = ""
    if signalled:
        ahead.look()  # asks for no batch any more
        assert stop.failure == ""
