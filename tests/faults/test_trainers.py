"""Faults of trainers and samplers, as tables: what is wrong, and how it must end.

refused   before any work, with the file or the flag, the values, and what to do
named     the run goes on, and the log says what is different
stopped   the run ends, exit code not 0, and every good file is as it was
"""

import argparse
import copy
import io
import json
import pickle
import shutil
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ogdm_core import (
    DiscreteVP,
    KarrasVE,
    Observer,
    OGDMConfig,
    checkpoints,
    sealed,
    trust,
    unpickle,
)
from ogdm_core.adm import compat as compat_adm
from ogdm_core.adm import data as data_adm
from ogdm_core.adm import resume as resume_adm
from ogdm_core.diffusers import __main__ as trainer
from ogdm_core.diffusers import train
from ogdm_core.edm import compat as compat_edm
from ogdm_core.edm import resume as resume_edm
from ogdm_core.edm import train as train_edm
from ogdm_core.ldm import compat as compat_ldm
from ogdm_core.ldm import sample as sample_ldm
from run.evaluate import __main__ as evaluate
from tests.edm.test_train import Loss, Net

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """The shims replace torch.load, and --trust holds for the process: here for one test."""
    monkeypatch.setattr(torch, "load", torch.load)
    token = trust.GIVEN.set(False)
    yield
    trust.GIVEN.reset(token)


# ---- damaged files: refused, by name ------------------------------------------------------------


def _edm_state(path):
    compat_edm.careful_pickle.read_training_states()
    return torch.load(path)


def _edm_snapshot(path):
    with open(path, "rb") as file:
        return compat_edm.careful_pickle.load(file)


def _ldm_checkpoint(path):
    compat_ldm._torch_load()
    return torch.load(path)


READERS = {
    "adm": ("model000002.pt", compat_adm.load_state_dict),
    "adm, edm: ours": ("ogdm000002.pt", sealed.load),
    "edm: training state": ("training-state-000002.pt", _edm_state),
    "edm: snapshot": ("snapshot.pkl", _edm_snapshot),
    "ldm": ("last.ckpt", _ldm_checkpoint),
}
DAMAGE = {
    "cut short": lambda content: content[: len(content) // 2],
    "its end lost": lambda content: content[:-40],
    "empty": lambda content: b"",
    "of another kind": lambda content: b"<html>not found</html>",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_named(tmp_path, reader, damage):
    name, read = READERS[reader]
    path = tmp_path / name
    content = {"weights": torch.arange(1000.0), "step": 2}
    if name.endswith(".pkl"):
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    assert read(str(path))["step"] == 2 and checkpoints.is_whole(path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert not checkpoints.is_whole(path)
    with pytest.raises(checkpoints.DamagedError, match=f"{name} is damaged"):
        read(str(path))


def test_the_newest_whole_one_is_offered(tmp_path):
    for name in ("a.ckpt", "b.ckpt", "c.ckpt"):
        torch.save({}, tmp_path / name)
    (tmp_path / "c.ckpt").write_bytes(b"PK")
    assert checkpoints.newest_whole(tmp_path.glob("*")).endswith("is " + str(tmp_path / "b.ckpt"))
    assert "start anew" in checkpoints.newest_whole([tmp_path / "c.ckpt"])


def test_lightning_offers_another_checkpoint_before_it_starts(tmp_path):
    lightning = pytest.importorskip("ogdm_core.ldm.lightning")
    torch.save({}, tmp_path / "step=3.ckpt")
    (tmp_path / "last.ckpt").write_bytes(b"PK\3\4 cut short")
    fit = lightning.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    fit.resume_from_checkpoint = str(tmp_path / "last.ckpt")
    model = lightning.pl.LightningModule()
    with pytest.raises(checkpoints.DamagedError, match=r"last\.ckpt is damaged.*step=3\.ckpt"):
        fit.fit(model)


# ---- a checkpoint is a complete set, or it is refused and the newest complete one is named -------


def _write(checkpoint: sealed.Checkpoint, state: dict) -> None:
    for name in checkpoint.names:
        path = Path(checkpoint.folder, name)
        if name.endswith(".pkl"):
            path.write_bytes(pickle.dumps({}))
        else:
            torch.save({"weights": torch.zeros(3)}, path)
    checkpoint.save(state)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


ADM_SETS = {  # what is done to the set of step 2, the file to resume, and the words of the refusal
    "EMA missing": (lambda f: (f / "ema_0.9_000002.pt").unlink(), "model000002.pt",
                    r"ema_0.9_000002.pt is missing"),
    "optimiser missing": (lambda f: (f / "opt000002.pt").unlink(), "model000002.pt",
                          r"opt000002.pt is missing"),
    "model cut short": (lambda f: _cut(f / "model000002.pt"), "model000002.pt",
                        r"model000002.pt is damaged \(\d+ of \d+ bytes\)"),
    "killed before the seal": (lambda f: (f / "ogdm000002.pt").unlink(), "model000002.pt",
                               r"ogdm000002.pt is missing"),
    "seal cut short": (lambda f: _cut(f / "ogdm000002.pt"), "model000002.pt",
                       r"ogdm000002.pt is damaged"),
    "an EMA file": (lambda f: (f / "ema_0.9_000002.pt").rename(f / "ema_0.9_000009.pt"),
                    "ema_0.9_000009.pt", "is not named modelNNNNNN.pt"),
    "a renamed file": (lambda f: (f / "model000002.pt").rename(f / "best.pt"), "best.pt",
                       "is not named modelNNNNNN.pt"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ADM_SETS)
def test_adm_resumes_complete_sets_only(tmp_path, fault):
    pytest.importorskip("blobfile")
    for step in (0, 2):
        _write(resume_adm.checkpoint(str(tmp_path), step, [0.9]), {"updates": step + 1})
    for step in (0, 2):
        assert resume_adm.check(f"{tmp_path}/model{step:06d}.pt", [0.9])["updates"] == step + 1
    harm, name, words = ADM_SETS[fault]
    harm(tmp_path)
    good = r"newest complete checkpoint is .*model000000\.pt.*--init_checkpoint"
    with pytest.raises(ValueError, match=f"{words}.*{good}"):
        resume_adm.check(f"{tmp_path}/{name}", [0.9])


def test_adm_resumes_with_the_ema_rates_of_the_run_only(tmp_path):
    pytest.importorskip("blobfile")
    _write(resume_adm.checkpoint(str(tmp_path), 2, [0.9]), {})
    with pytest.raises(ValueError, match=r"ema_0\.5_000002\.pt is missing.*--ema_rate differs"):
        resume_adm.check(f"{tmp_path}/model000002.pt", [0.9, 0.5])


def _edm_run(folder: Path) -> dict:
    options = {
        "total_kimg": 4, "batch_size": 8, "ema_halflife_kimg": 500,
        "network_kwargs": {"class_name": "EDMPrecond", "dropout": 0.1},
        "loss_kwargs": {"class_name": "EDMLoss"}, "optimizer_kwargs": {"lr": 0.1},
    }  # fmt: skip
    for kimg in (1, 2, 4):
        _write(resume_edm.checkpoint(str(folder), kimg * 1000), {"nimg": kimg * 1000})
    (folder / "training_options.json").write_text(json.dumps(options))
    return options


EDM_SETS = {  # what is done to which file of the checkpoint at 2 kimg, and the word for it
    "state cut short": (_cut, "training-state-000002.pt", "damaged"),
    "snapshot cut short": (_cut, "network-snapshot-000002.pkl", "damaged"),
    "snapshot missing": (Path.unlink, "network-snapshot-000002.pkl", "missing"),
    "killed before the seal": (Path.unlink, "ogdm-state-000002.pt", "missing"),
    "seal cut short": (_cut, "ogdm-state-000002.pt", "damaged"),
}


@pytest.mark.parametrize("fault", EDM_SETS)
def test_edm_resumes_complete_sets_only(tmp_path, fault):
    options = _edm_run(tmp_path)
    state = str(tmp_path / "training-state-000002.pt")
    resume_edm.check(state, options)
    harm, name, word = EDM_SETS[fault]
    harm(tmp_path / name)
    (tmp_path / "ogdm-state-000004.pt").unlink()
    with pytest.raises(click.ClickException) as refused:
        resume_edm.check(state, options)
    assert f"{name} is {word}" in refused.value.message
    assert "newest complete checkpoint is" in refused.value.message
    assert "training-state-000001.pt" in refused.value.message


def test_states_of_earlier_versions_keep_no_sizes_and_files_are_looked_at(tmp_path):
    checkpoint = resume_edm.checkpoint(str(tmp_path), 2000)
    _write(checkpoint, {})
    sealed.save(f"{tmp_path}/{checkpoint.ours}", {"nimg": 2000})
    assert checkpoint.read() == {"nimg": 2000}
    _cut(tmp_path / checkpoint.names[0])
    with pytest.raises(ValueError, match=r"training-state-000002\.pt is damaged"):
        checkpoint.read()


EDM_OPTIONS = {  # changed option: the words, and whether it is refused or named
    "precond": ({"loss_kwargs": {"class_name": "VPLoss"}}, "loss_kwargs.class_name: EDMLoss", True),
    "network": ({"network_kwargs": {"class_name": "VPPrecond"}}, "network_kwargs.class_name", True),
    "ema": ({"ema_halflife_kimg": 5}, "ema_halflife_kimg: 500 there, 5 here", True),
    "lr": ({"optimizer_kwargs": {"lr": 0.2}}, "optimizer_kwargs.lr: 0.1 there, 0.2 here", False),
    "batch": ({"batch_size": 16}, "batch_size: 8 there, 16 here", False),
    "nothing": ({"total_kimg": 9}, "", False),
}


@pytest.mark.parametrize("change", EDM_OPTIONS)
def test_edm_compares_the_options_of_the_two_runs(tmp_path, change, capsys):
    options = _edm_run(tmp_path)
    other, words, refused = EDM_OPTIONS[change]
    state = str(tmp_path / "training-state-000002.pt")
    if refused:
        with pytest.raises(click.ClickException) as error:
            resume_edm.check(state, options | other)
        assert words in error.value.message
        return
    resume_edm.check(state, options | other)
    said = capsys.readouterr().out
    assert words in said if words else not said


def test_edm_has_nothing_to_do_for_a_finished_run(tmp_path, capsys):
    options, state = _edm_run(tmp_path), str(tmp_path / "training-state-000004.pt")
    with pytest.raises(click.exceptions.Exit) as end:
        resume_edm.check(state, options)
    assert end.value.exit_code == 0 and "nothing to do" in capsys.readouterr().out
    resume_edm.check(state, options | {"total_kimg": 5})


# ---- resume with other settings: one rule -------------------------------------------------------


def _observer(schedule=None, channels=1, size=8, labels=0, **settings) -> Observer:
    config = OGDMConfig(**{"d_kind": "light", "d_width": 0.1} | settings)
    return Observer(config, schedule or DiscreteVP.linear(100), channels, size, labels)


SETTINGS = {  # of the run that resumes, the words, and whether it is refused
    "T": ({"schedule": DiscreteVP.linear(50)}, r"T: 100\.0 there, 50\.0 here", True),
    "betas": ({"schedule": DiscreteVP.from_betas(np.full(100, 0.02))}, "sigma_max: ", True),
    "kind": ({"schedule": KarrasVE()}, "schedule: DiscreteVP there, KarrasVE here", True),
    "sigma_data": ({"schedule": DiscreteVP.linear(100, 1.0)}, "sigma_data: 0.5 there", True),
    "d_width": ({"d_width": 0.2}, "d_width: 0.1 there, 0.2 here", True),
    "d_kind": ({"d_kind": "paper"}, "d_kind: light there, paper here", True),
    "size": ({"size": 16}, "size: 8 there, 16 here", True),
    "channels": ({"channels": 3}, "channels: 1 there, 3 here", True),
    "labels": ({"labels": 10}, "labels: 0 there, 10 here", True),
    "k": ({"k": 0.3}, "k: 0.4 there, 0.3 here", False),
    "two": ({"gamma": 0.5, "seed": 3}, "gamma: None there, 0.5 here; seed: 0 there", False),
    "form": ({"adversarial": "hinge"}, "adversarial: nonsaturating there, hinge here", False),
    "rates": ({"d_lr": 1e-4, "r1": 0.5}, "r1: 0.01 there, 0.5 here; d_lr: 0.001 there", False),
    "none": ({}, "", False),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_what_changes_the_meaning_is_refused_and_the_rest_is_named(change):
    other, words, refused = SETTINGS[change]
    state, observer = _observer().state_dict(), _observer(**other)
    before = [p.clone() for p in observer.D.parameters()]
    if refused:
        with pytest.raises(ValueError, match=f"does not fit this run .*{words}.*settings it was"):
            observer.load_state_dict(state)
        assert all(map(torch.equal, observer.D.parameters(), before))
    else:
        said = observer.load_state_dict(state)
        assert words in said if words else said == ""


def test_states_of_earlier_versions_still_load():
    state = _observer().state_dict()
    del state["schedule"], state["config"]["d_mapping_lr"]
    state["config"]["d_betas"] = [0.9, 0.999]
    assert _observer().load_state_dict(state) == ""


# ---- files that are programs: refused without --trust -------------------------------------------


def _edm_pickles(folder: Path, edm: Path, *flags: str) -> dict[str, str]:
    return _edm_script("edm_pickles.py", edm, folder, *flags)


def _edm_script(name: str, edm: Path, *args: str | Path) -> dict[str, Any]:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, HERE / name, *args]
    done = subprocess.run(script, cwd=edm, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_edm_reads_data_or_says_why_not(patched, tmp_path):
    became = _edm_script("edm_fuzz.py", patched("edm"), tmp_path, "600")
    assert min(became[kind] for kind in ("data", "refused", "damaged")) > 5


SCRIPT_READERS = {
    "ours": sealed.load, "adm": compat_adm.load_state_dict, "edm": _edm_state, "ldm": _ldm_checkpoint,
    "any": lambda path: trust.load(path, weights_only=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["TorchScript", "tar"])
@pytest.mark.parametrize("reader", SCRIPT_READERS)
def test_archives_that_are_programs_are_refused(tmp_path, reader, kind):
    if reader == "adm":
        pytest.importorskip("blobfile")
    path = tmp_path / "training-state-000001.pt"
    if kind == "tar":
        with tarfile.open(path, "w") as tar:
            tar.add(__file__, "storages")
    else:
        torch.jit.script(torch.nn.Identity()).save(path)
    with pytest.raises(trust.RefusedError, match=f"a {kind} archive, which may run any code"):
        SCRIPT_READERS[reader](str(path))


def test_edm_reads_upstreams_own_classes_and_runs_nothing_else(patched, tmp_path):
    assert _edm_pickles(tmp_path, patched("edm")) == {
        "good": "read", "good state": "read", "call": "refused", "state": "refused",
        "upstream's function": "refused", "nested": "failed", "other source": "read",
        "other class": "refused", "attribute of a class": "failed", "its own source": "refused",
        "its own method": "refused", "a class": "refused", "script": "refused",
    }  # fmt: skip


def test_edm_runs_everything_with_trust(patched, tmp_path):
    results = _edm_pickles(tmp_path, patched("edm"), "--trust")
    assert results["good"] == "read" and results["call"] == "read and ran code"
    assert results["attribute of a class"].endswith("and ran code") and results["script"] == "read"


TARGETS = {
    "torch.nn.Identity": True, "ogdm_core.images.Images": True,
    "os.system": False, "subprocess.Popen": False, "torch.hub.load": False, "torch.load": False,
    "pytorch_lightning.cli.LightningCLI": False, "run.launch.Command": False,
    "ogdm_core.images.ThreadPoolExecutor": False, "ogdm_core.files.atomic_write": False,
}  # fmt: skip


@pytest.mark.parametrize("home", ["ldm.util", "taming.main"])
@pytest.mark.parametrize("trusted", [False, True])
def test_ldm_configs_name_known_classes_only(monkeypatch, trusted, home):
    omegaconf = pytest.importorskip("omegaconf")

    looked_up = []

    def get_obj_from_str(string, reload=False):
        looked_up.append(string)
        module, name = string.rsplit(".", 1)
        return getattr(__import__(module, fromlist=[name]), name)

    for name in ("ldm", "ldm.util", "taming", "taming.main"):
        module = types.ModuleType(name)
        module.get_obj_from_str, module.instantiate_from_config = get_obj_from_str, lambda config: "made"
        monkeypatch.setitem(sys.modules, name, module)
    compat_ldm._only_known_targets()
    upstream = sys.modules[home]
    if trusted:
        parser = argparse.ArgumentParser()
        parser.add_argument("--trust", action=trust.TrustFlag)
        assert vars(parser.parse_args(["--trust"])) == {}
    for target, known in TARGETS.items():
        config = {"target": "torch.nn.Identity", "params": {"a": [{"b": {"target": target}}]}}
        if known or trusted:
            assert upstream.get_obj_from_str(target) is get_obj_from_str(target)
            assert upstream.instantiate_from_config(config) == "made"
            continue
        with pytest.raises(trust.RefusedError, match=f"{target}.*--trust"):
            upstream.get_obj_from_str(target)
        if not target.startswith(compat_ldm.TARGETS):  # deep in the tree, and nothing around it is made
            assert target not in looked_up  # which would import its module
            with pytest.raises(trust.RefusedError, match=f"{target}.*--trust"):
                upstream.instantiate_from_config(omegaconf.OmegaConf.create(config))


# ---- a run that diverges: stopped, nothing lost -------------------------------------------------


def _guard(weights: list, averages: list) -> checkpoints.Guard:
    return checkpoints.Guard(lambda: weights, lambda: averages, lambda: "the last good one is x.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2e3, -1e30])
@pytest.mark.parametrize("kind", ["weights", "averages"])
def test_weights_that_diverged_end_the_run(kind, value):
    parts = {"weights": [torch.ones(3), torch.ones(2, 2, dtype=torch.float16)], "averages": [torch.ones(3)]}
    guard = _guard(**parts)
    guard.count(torch.ones(2))
    parts[kind][0][1] = 9e2
    guard.check("step 2")
    parts[kind][0][1] = value
    with pytest.raises(SystemExit) as end:
        guard.check("step 3")
    words = f"denoiser's {kind} reach" if abs(value) < float("inf") else f"denoiser's {kind} are not finite"
    assert f"step 3 the {words}" in end.value.code and "the last good one is x.pt" in end.value.code


@pytest.mark.parametrize("later, words", [
    ([0.5, 2.0] * 20, ""), ([2.1e3] * 10, "loss is 2.1e"), ([float("nan")] * 4 + [1.0] * 6, ""),
    ([float("nan")] * 5 + [1.0] * 5, "losses are not finite"),
])  # fmt: skip
def test_a_loss_that_diverged_ends_the_run(later, words):
    guard = _guard([torch.ones(3)], [])
    for _ in range(100):
        guard.count(torch.tensor([0.001, 3.999]))
        guard.look("step 1")
    for loss in later:
        guard.count(torch.tensor(loss))
    if words:
        with pytest.raises(SystemExit, match=words):
            guard.look("step 2")
    else:
        guard.look("step 2")


TINY = ["--data", "digits", "--channels", "8,8", "--batch-size", "4", "--steps", "6"]
OGDM = ["--ogdm", "--ogdm-d-kind", "light"]


@pytest.mark.parametrize("flags", [[], OGDM], ids=["plain", "ogdm"])
@pytest.mark.parametrize("every", ["1", "50"], ids=["found at log", "found at save"])
def test_diffusers_stops_and_keeps_the_good_checkpoint(tmp_path, flags, every):
    out = ["--output", str(tmp_path), *TINY, *flags, "--save-every", "2"]
    trainer.main([*out, "--steps", "2"])
    good = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(SystemExit) as end:
        trainer.main([*out, "--lr", "1e30", "--log-every", every])
    assert "the training diverged" in str(end.value.code)
    assert str(tmp_path / "checkpoint.pt") in str(end.value.code)
    left = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    log = left.pop(tmp_path / "log.jsonl")  # goes on to the last step whose weights were finite
    assert log.startswith(good.pop(tmp_path / "log.jsonl")) and b"NaN" not in log and left == good


def test_diffusers_names_what_was_changed_on_purpose(tmp_path, capsys):
    out = ["--output", str(tmp_path), *TINY, *OGDM]
    trainer.main([*out, "--steps", "1"])
    trainer.main([*out, "--steps", "2", "--lr", "0.5", "--ogdm-k", "0.3", "--seed", "7"])
    said = capsys.readouterr().out
    for words in ("lr: 0.0001 there, 0.5 here", "ogdm_k: 0.4 there, 0.3 here", "seed: 0 there"):
        assert words in said


@pytest.mark.parametrize("damage", DAMAGE)
def test_diffusers_names_a_damaged_checkpoint(tmp_path, damage, capsys):
    torch.save({"step": 1, "unet": torch.zeros(1000)}, tmp_path / "checkpoint.pt")
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(DAMAGE[damage](whole))
    with pytest.raises(SystemExit) as end:
        trainer.main(["--output", str(tmp_path), *TINY])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "checkpoint.pt is damaged" in said and "start over" in said


def _nan(tensors: list) -> list:
    return [torch.full_like(tensors[0], torch.nan), *tensors[1:]]


CHECKPOINTS = {  # what becomes of a good one of step 1, and the words
    "no average": (lambda s: {k: v for k, v in s.items() if k != "ema"}, "is damaged.*'ema'.*start over"),
    "no settings": (lambda s: {k: v for k, v in s.items() if k != "run"}, "is damaged.*'run'.*start over"),
    "a list": (lambda s: [s], "is damaged, or no checkpoint .*start over"),
    "settings of a list": (lambda s: s | {"run": [1]}, "is damaged, or no checkpoint .*start over"),
    "short average": (lambda s: s | {"ema": s["ema"][:-1]}, "is damaged.*average do not fit"),
    "average of numbers": (lambda s: s | {"ema": [1, 2]}, "is damaged.*start over"),
    "NaN in the average": (lambda s: s | {"ema": _nan(s["ema"])}, "is damaged.*are not finite"),
    "step -5": (lambda s: s | {"step": -5}, "is damaged.*it is at step -5"),
    "format 99": (lambda s: s | {"format": 99}, "has format 99, and this version reads up to 1; continue it with"),
}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A folder with the model and the checkpoint of one step."""
    folder = tmp_path_factory.mktemp("one step")
    trainer.main(["--output", str(folder), *TINY, "--steps", "1"])
    return folder


@pytest.mark.parametrize("fault", CHECKPOINTS)
def test_diffusers_refuses_a_checkpoint_that_is_none_of_its_own(tmp_path, one_step, fault, refused):
    change, words = CHECKPOINTS[fault]
    state = torch.load(one_step / "checkpoint.pt", weights_only=True)
    torch.save(change(state), tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with refused(f"checkpoint.pt {words}"):
        trainer.main(["--output", str(tmp_path), *TINY])
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_diffusers_continues_a_checkpoint_without_a_format(tmp_path, one_step):
    state = torch.load(one_step / "checkpoint.pt", weights_only=True)
    assert state.pop("format") == 1
    torch.save(state, tmp_path / "checkpoint.pt")
    assert trainer.main(["--output", str(tmp_path), *TINY, "--steps", "2"]) == 0


def test_diffusers_looks_at_the_average_that_it_exports(tmp_path):
    args = trainer.parser().parse_args(["--output", str(tmp_path), *TINY])
    run = train.Trainer(args)
    run.ema.shadow_params[0][0] = torch.nan
    with pytest.raises(SystemExit, match="averages are not finite"):
        run.save()
    assert [p.name for p in tmp_path.iterdir()] == [".training.lock"]


def test_adm_looks_at_the_averages_that_it_saves(patched):
    code = (
        "import torch, types\nfrom ogdm_core.adm import train\n"
        "train.train_util.get_blob_logdir = lambda: '.'\n"
        "master = types.SimpleNamespace(master_params=[torch.ones(2)])\n"
        "loop = types.SimpleNamespace(mp_trainer=master, step=3, resume_step=0, ema_rate=[0.9],\n"
        "    ema_params=[[torch.full((2,), torch.nan)]])\n"
        "train.ObservedLoop._guard(loop).check('step 3')\n"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    line, where = [sys.executable, "-c", code], patched("guided-diffusion")
    done = subprocess.run(line, cwd=where, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "at step 3 the denoiser's averages are not finite" in done.stderr, done.stderr


def test_edm_looks_at_the_averages_that_it_saves(tmp_path):
    """Row 10: one NaN in one tensor of the average, and every weight finite."""
    net = Net()
    ema, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters())
    config = OGDMConfig(d_width=0.02)
    session = train_edm.Session(config, net, ema, Loss(), optimizer, run_dir=str(tmp_path))
    _write(resume_edm.checkpoint(str(tmp_path), 2000), {"nimg": 2000})
    session.check(3000)
    ema.conv.bias.data[0] = torch.nan
    with pytest.raises(SystemExit, match="at 3 kimg the denoiser's averages are not finite.*training-state-000002.pt"):
        session.check(3000)


def _without(name: str):
    def harm(folder: Path) -> None:
        weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
        save_file({k: v for k, v in load_file(weights).items() if k != name}, weights)

    return harm


MODELS = {
    "a tensor less": (_without("conv_in.weight"), "unet lacks 1 of the network's tensors, such as conv_in.weight; get"),
    "deep": (lambda f: (f / "unet" / "config.json").write_text("[" * 200_000), "unet/config.json cannot be read"),
    "no JSON": (lambda f: (f / "unet" / "config.json").write_text("{"), "unet/config.json cannot be read as JSON"),
    "a list": (lambda f: (f / "unet" / "config.json").write_text("[]"), "unet/config.json holds a list"),
    "schedule": (lambda f: (f / "scheduler/scheduler_config.json").write_text("{" * 9), "scheduler_config.json cannot"),
}


@pytest.mark.parametrize("fault", MODELS)
def test_a_damaged_model_is_named(tmp_path, one_step, fault, refused):
    harm, words = MODELS[fault]
    for part in ("unet", "scheduler"):
        shutil.copytree(one_step / part, tmp_path / "model" / part)
    harm(tmp_path / "model")
    with refused(words):
        trainer.main(["--output", str(tmp_path / "out"), *TINY, "--model", str(tmp_path / "model")])
    if "unet/config.json" in words:
        with refused(words):
            evaluate.main(["digits", str(tmp_path / "model"), "--features", "pixels"])


def test_an_export_that_finds_no_room_names_its_folder(tmp_path, monkeypatch, refused):
    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(train.DDPMPipeline, "save_pretrained", full)
    with refused("could not be written to .*No space left.*checkpoint.pt is whole: make room, and the same"):
        trainer.main(["--output", str(tmp_path), *TINY, "--steps", "1"])
    monkeypatch.undo()
    assert trainer.main(["--output", str(tmp_path), *TINY, "--steps", "1"]) == 0


def test_an_export_has_the_mode_that_the_umask_gives(one_step):
    modes = {file.name: file.stat().st_mode for file in (one_step / "unet").iterdir()}
    assert len(modes) == 2 and len(set(modes.values())) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce] can't allocate memory: you tried\n...")])
def test_too_little_memory_is_said_in_one_line(tmp_path, monkeypatch, error, refused):
    def short(*args):
        raise error

    monkeypatch.setattr(train.data_sets.Images, "batch", short)
    with refused("error: not enough memory .*; give a smaller --batch-size"):
        trainer.main(["--output", str(tmp_path), *TINY])


MEETINGS = {  # by what the ranks meet, how a rank gets there, where they meet
    "diffusers": (train, "Accelerator", lambda out: trainer.main(["--output", out, *TINY]), "here:29500"),
    "edm": (compat_edm, "_provide_distutils", lambda out: compat_edm.install.__wrapped__(), "here:29500"),
    "adm": (compat_adm, "abort_on_error", lambda out: compat_adm.set_up_together(_meet)(), "MPI's first host"),
}


def _meet(*args, **kwargs):
    raise OSError("the others did not come")


@pytest.mark.parametrize("backbone", MEETINGS)
def test_a_rank_says_whom_it_waits_for(tmp_path, monkeypatch, capsys, backbone):
    """Row 26."""
    home, name, start, where = MEETINGS[backbone]
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(variable, value)
    world = types.SimpleNamespace(rank=1, size=2, allgather=lambda item: [item, item])
    mpi = types.SimpleNamespace(COMM_WORLD=world, Get_processor_name=lambda: "here")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(home, name, (lambda world: None) if backbone == "adm" else _meet)
    with pytest.raises((SystemExit, OSError)):
        start(str(tmp_path))
    assert capsys.readouterr().err.startswith(f"rank 1: waiting for 2 processes at {where}\n")


# ---- data: refused before training, with numbers ------------------------------------------------


GREY, DEEP = np.zeros((8, 8), np.uint8), np.full((8, 8), 40000, np.uint16)
ADM_DATA = {  # files, flags, words
    "too few": ({"0_a.png": GREY}, {"batch_size": 4}, "has 1 images, 1 per rank; --batch_size 4"),
    "none": ({}, {"batch_size": 4}, "has 0 images"),
    "no class": ({"0_a.png": GREY, "1.png": GREY}, {"class_cond": True}, "1 of 2 .* such as 1.png"),
    "classes": ({f"{i}_a.png": GREY for i in range(4)}, {"class_cond": True}, "4 classes .* has 3"),
    "16 bits": ({"0_a.png": GREY, "0_b.png": DEEP}, {}, "0_b.png has 16 bits"),
    "good": ({"0_a.png": GREY, "1_b.png": GREY}, {"class_cond": True}, ""),
}


@pytest.mark.parametrize("fault", ADM_DATA)
def test_adm_data_is_checked_before_training(tmp_path, monkeypatch, fault):
    pytest.importorskip("blobfile")
    contents, flags, words = ADM_DATA[fault]
    for name, array in contents.items():
        Image.fromarray(array).save(tmp_path / name)
    calls = []

    def listed(folder):
        calls.append(folder)
        return sorted(map(str, Path(folder).glob("*")))

    class Gone(list):
        local_images = ["a.png", "b.png"]

    data_sets = types.SimpleNamespace(_list_image_files_recursively=listed, ImageDataset=Gone)
    monkeypatch.setattr(data_adm.dist, "get_world_size", lambda: 1)
    defaults = {"data_dir": str(tmp_path), "batch_size": 1, "class_cond": False}
    args = argparse.Namespace(**defaults | flags)
    if words:
        with pytest.raises(ValueError, match=words):
            data_adm.check(args, 3, data_sets)
    else:
        data_adm.check(args, 3, data_sets)
        data_sets._list_image_files_recursively(str(tmp_path))
        assert len(calls) == 1  # upstream's own call is answered from the check's
        with pytest.raises(checkpoints.DamagedError, match=r"b.png cannot be read \(list index out of range\)"):
            data_sets.ImageDataset()[1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("refused", [True, False], ids=["a refusal", "a bug"])
def test_adm_shows_a_traceback_for_bugs_alone(tmp_path, monkeypatch, capsys, ranks, refused):
    pytest.importorskip("blobfile")
    ended = []
    world = types.SimpleNamespace(rank=0, size=ranks, Abort=ended.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(compat_adm, "REPORT_SECONDS", 0)
    compat_adm.abort_on_error(world)
    try:
        resume_adm.check(f"{tmp_path}/best.pt", [0.9]) if refused else int("x")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    said = capsys.readouterr().err
    assert ended == [1] * (ranks - 1)
    assert ("Traceback" in said) is not refused and ("rank 0 failed" in said) is (ranks == 2)
    assert said.startswith("error: --resume_checkpoint: best.pt is not named") is refused


def test_sizes_that_do_not_halve_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", np.zeros((4, 15, 15, 1), np.uint8))
    with pytest.raises(SystemExit):
        trainer.main([*TINY, "--data", str(tmp_path / "a.npz"), "--output", str(tmp_path / "out")])
    assert "does not come out even" in capsys.readouterr().err


# ---- flags and outputs: refused before any work -------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_edm_refuses_seeds_that_numpy_does_not_take(seed):
    with pytest.raises(click.ClickException, match=r"give one in \[0, 2\^32\)"):
        compat_edm.agree_on_seed(seed)


def test_the_trainers_output_is_tried_first(tmp_path, capsys):
    (tmp_path / "out" / "checkpoint.pt").mkdir(parents=True)
    with pytest.raises(SystemExit):
        trainer.main(["--output", str(tmp_path / "out"), *TINY])
    assert "is a folder" in capsys.readouterr().err


# ---- LDM ----------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.first_stage_model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.register_buffer("betas", torch.zeros(3))


LDM_WEIGHTS = {  # the names that are left out, and whether sampling is refused
    "all": ("", True), "denoiser": ("model.", True), "first stage": ("first_stage_model.", True),
    "schedule": ("betas", False), "none": ("nothing", False),
}  # fmt: skip


@pytest.mark.parametrize("fault", LDM_WEIGHTS)
def test_ldm_does_not_sample_random_weights(monkeypatch, fault):
    left_out, refused = LDM_WEIGHTS[fault]
    util = types.SimpleNamespace(instantiate_from_config=lambda config: _Model())
    monkeypatch.setitem(sys.modules, "ldm", types.SimpleNamespace(util=util))
    monkeypatch.setitem(sys.modules, "ldm.util", util)
    monkeypatch.setattr(sample_ldm, "without_checkpoints", lambda config: config)
    state = {k: v for k, v in _Model().state_dict().items() if not k.startswith(left_out)}
    if refused:
        with pytest.raises(SystemExit, match="lacks [24] of the model's weights"):
            sample_ldm.load_model_from_config({}, state)
    else:
        sample_ldm.load_model_from_config({}, state)


@pytest.mark.parametrize("eta", ["nan", "5", "-1"])
def test_ldms_own_sampler_is_not_run_with_such_an_eta(capsys, eta):
    """Row 12: the flag is upstream's, and without --sampler the sampler is, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--eta", type=float, default=1.0)
    for name in ("--vanilla_sample", "--custom_steps"):
        parser.add_argument(name)
    sample_ldm.add_arguments(parser)
    assert parser.parse_args(["-e", "1"]).eta == 1
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["-e", eta])
    assert end.value.code == 2 and f"--eta: {eta} is not allowed; give a number in [0, 1]" in capsys.readouterr().err


def test_ldm_errors_before_the_set_up_are_not_hidden():
    resume_ldm = pytest.importorskip("ogdm_core.ldm.resume")
    assert resume_ldm.ExactResume().state_dict() == {}
    assert compat_ldm.no_trainer.global_rank != 0


def test_an_unpickler_of_ours_reads_plain_content_only():
    good = {"a": torch.ones(2), "b": np.ones(2), "c": {1, 2}, "d": np.float32(1)}
    read = unpickle.Unpickler(io.BytesIO(pickle.dumps(good))).load()
    assert torch.equal(read["a"], good["a"]) and read["c"] == {1, 2}
    long = pickle.dumps(torch.ones(5), 2).replace(b"K\x05\x85", b"J\x05\x00\x00\x01\x85")
    with pytest.raises(ValueError, match="does not fit its storage of 5 numbers"):
        unpickle.Unpickler(io.BytesIO(long)).load()
    with pytest.raises(trust.RefusedError, match="builtins.eval"):
        unpickle.Unpickler(io.BytesIO(pickle.dumps(eval))).load()
