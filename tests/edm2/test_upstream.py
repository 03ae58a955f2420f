"""OGDM in the real NVlabs/edm2, on digits and tiny networks."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
OGDM = {"d_width": 0.02, "plain_end": 0, "rho": 20.0}
WEIGHTS = "training-state-0000001.pt"
SNAPSHOT = "network-snapshot-0000001-0.100.pkl"


def python(*words, cwd=None, fails=False, ranks=0) -> str:
    """What a script prints; with `ranks` it is started by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *torchrun, *map(str, words)], cwd=cwd, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert bool(done.returncode) == fails, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Real digits in upstream's own format, as RGB, with labels."""
    path, digits, labels = tmp_path_factory.mktemp("data") / "digits.zip", load_digits(), []
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(200):
            pixels = (digits.images[i] / 16 * 255).round().astype(np.uint8)
            png = io.BytesIO()
            PIL.Image.fromarray(pixels).convert("RGB").save(png, "png")
            archive.writestr(f"{i:05d}.png", png.getvalue())
            labels.append([f"{i:05d}.png", int(digits.target[i])])
        archive.writestr("dataset.json", json.dumps({"labels": labels}))
    return path


def loop(clone: Path, folder: Path, data: Path, cases: dict[str, dict], ranks: int = 0) -> Path:
    file = folder / f"cases-{ranks}-{'-'.join(cases)}.json"
    file.write_text(json.dumps([{"out": str(folder / name), "data": str(data), **c} for name, c in cases.items()]))
    python(HERE / "edm2_loop.py", clone, file, ranks=ranks)
    return folder


@pytest.fixture(scope="module")
def runs(patched, pristine, data, tmp_path_factory) -> Path:
    """Folders of short runs, by name; the two of `pristine` are by the untouched clone."""
    folder = tmp_path_factory.mktemp("runs")
    loop(pristine("edm2"), folder, data, {"pristine": {"dropout": 0.1}})
    snapshot = str(folder / "pristine" / SNAPSHOT)
    return loop(patched("edm2"), folder, data, {
        "plain": {"dropout": 0.1},
        "gamma0": {"dropout": 0.1, "ogdm": OGDM | {"gamma": 0.0}},
        "ogdm": {"dropout": 0.1, "ogdm": OGDM},
        "heun": {"dropout": 0.1, "ogdm": OGDM | {"projection": "heun"}},
        "one": {"same_noise": True, "bare": True, "ogdm": OGDM | {"projection": "heun"}},
        "transfer": {"transfer": snapshot},
        "another": {"transfer": snapshot, "channels": 16},
    })  # fmt: skip


def flat(value, name=""):
    """Nested containers as one flat dict."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in pairs for k, v in flat(item, f"{name}/{key}").items()}
    return {name: value}


def state(path: Path) -> dict:
    """The tensors of a training state or of ours."""
    import ogdm_core.dnnlib as reader

    inert = reader.unpickle.pickle_module(reader._Unpickler)
    found = torch.load(path, weights_only=False, pickle_module=inert)
    return {name: value for name, value in flat(found).items() if isinstance(value, torch.Tensor)}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and len(a) > 5 and all(torch.equal(a[n], b[n]) for n in a)


def test_without_flags_it_is_upstream_bit_for_bit(runs, pristine):
    assert same(state(runs / "plain" / WEIGHTS), state(runs / "pristine" / WEIGHTS))
    source = (pristine("edm2") / "training" / "training_loop.py").read_bytes()
    for name in ("pristine", "plain", "ogdm"):  # a snapshot holds the source around the loss, without our lines
        snapshot = (runs / name / SNAPSHOT).read_bytes()
        assert source in snapshot and b"ogdm_core" not in snapshot


def test_an_observer_without_weight_changes_nothing(runs):
    assert same(state(runs / "gamma0" / WEIGHTS), state(runs / "plain" / WEIGHTS))
    for name in ("ogdm", "heun"):
        assert not same(state(runs / name / WEIGHTS), state(runs / "plain" / WEIGHTS))
    lines = (runs / "ogdm" / "stats.jsonl").read_text().splitlines()
    assert {"OGDM/emission", "OGDM/d_loss", "Loss/loss"} <= set(json.loads(lines[-1]))


def test_the_same_command_again_continues_exactly(runs, patched, data, tmp_path):
    """Stopped after 1,024 of 2,048 images; the whole is one run of 2,048."""
    case = {"dropout": 0.1, "ogdm": OGDM | {"projection": "heun"}, "batch_gpu": 32}
    code = (HERE / "edm2_loop.py").read_text().replace("total_nimg=1024", "total_nimg=2048")
    (tmp_path / "long.py").write_text(code)
    cases = [{"out": str(tmp_path / name), "data": str(data), **case} for name in ("whole", "parts")]
    (tmp_path / "whole.json").write_text(json.dumps(cases[:1]))
    (tmp_path / "parts.json").write_text(json.dumps(cases[1:]))
    python(tmp_path / "long.py", patched("edm2"), tmp_path / "whole.json")
    (tmp_path / "parts").mkdir()
    for name in (WEIGHTS, "ogdm-state-0000001.pt"):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "parts" / name)
    said = python(tmp_path / "long.py", patched("edm2"), tmp_path / "parts.json")
    assert "continues with its discriminator" in said
    for name in ("training-state-0000002.pt", "ogdm-state-0000002.pt"):
        assert same(state(tmp_path / "parts" / name), state(tmp_path / "whole" / name))
    said = python(tmp_path / "long.py", patched("edm2"), tmp_path / "parts.json")
    assert "is finished: 2048 of 2048 images" in said


def test_two_ranks_are_one(runs, patched, data, tmp_path):
    case = {"same_noise": True, "ogdm": OGDM | {"projection": "heun"}}
    loop(patched("edm2"), tmp_path, data, {"two": case}, ranks=2)
    for name in (WEIGHTS, "ogdm-state-0000001.pt"):
        one, two = state(runs / "one" / name), state(tmp_path / "two" / name)
        assert one.keys() == two.keys()
        for key in one:
            if "optimizer" not in key:  # Adam's first moments are close to zero; their ratio is noise
                torch.testing.assert_close(one[key], two[key], atol=2e-3, rtol=2e-3)


def test_a_start_from_a_snapshot(runs):
    assert not (runs / "transfer" / "error.txt").exists()
    said = (runs / "another" / "error.txt").read_text()
    assert "is of another network" in said and SNAPSHOT in said and "--channels" in said


def test_snapshots_load_in_an_untouched_clone(runs, pristine):
    """Without this repository on the path; the stored source of the loss is upstream's."""
    code = "import pickle, sys; d = pickle.load(open(sys.argv[1], 'rb')); print(type(d['loss_fn']).__name__, sorted(d))"
    command = [sys.executable, "-c", code, runs / "ogdm" / SNAPSHOT]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=pristine("edm2"), env=env, capture_output=True, text=True)
    assert done.stdout.startswith("EDM2Loss ['dataset_kwargs', 'ema', 'encoder', 'loss_fn']"), done.stderr


# ---- the command lines ----------------------------------------------------------------------------


def test_bad_input_is_refused_before_training(runs, patched, data, tmp_path):
    edm2 = patched("edm2")
    common = [edm2 / "train_edm2.py", f"--data={data}", "--preset=edm2-img64-xs", "--ogdm", "-n"]
    said = python(*common, "--lr-rampup=0", "--blocks=1", "--channel-mult=1", f"--outdir={tmp_path / 'new'}")
    assert "learning rate is 0.012 at once" in said and '"num_blocks": 1' in said and '"rho"' in said
    (tmp_path / "lost").mkdir()
    shutil.copy(runs / "ogdm" / WEIGHTS, tmp_path / "lost")
    said = python(*common, f"--outdir={tmp_path / 'lost'}", fails=True)
    assert "ogdm-state-0000001.pt is missing" in said and "Traceback" not in said
    bare = tmp_path / "bare.zip"
    with zipfile.ZipFile(data) as old, zipfile.ZipFile(bare, "w") as new:
        for name in old.namelist():
            if name != "dataset.json":
                new.writestr(name, old.read(name))
    common[1] = f"--data={bare}"
    assert "no labels found" in python(*common, f"--outdir={tmp_path / 'new'}", fails=True)


class Call:
    """Pickles as a call that the reader is asked to make."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture(scope="module")
def sampled(runs, patched, pristine, tmp_path_factory) -> Path:
    """Images of one snapshot, by name of the case."""
    folder, clone = tmp_path_factory.mktemp("sampled"), patched("edm2") / "generate_images.py"
    net, gnet = (f"--net={runs / 'ogdm' / SNAPSHOT}", f"--gnet={runs / 'plain' / SNAPSHOT}")
    cases = {
        "theirs": [clone, "--steps=4"], "untouched": [pristine("edm2") / "generate_images.py", "--steps=4"],
        "heun": [clone, "--sampler=heun", "--nfe=7", f"--npz={folder / 'heun.npz'}"],
        "euler": [clone, "--sampler=euler", "--nfe=7"],
        "guided-theirs": [clone, "--steps=4", gnet, "--guidance=2"],
        "guided": [clone, "--sampler=heun", "--nfe=14", gnet, "--guidance=2"],
    }  # fmt: skip
    for name, (script, *words) in cases.items():
        shims = ["-m", "ogdm_core.edm2.compat"] if name == "untouched" else []
        python(*shims, script, net, "--seeds=0-7", "--batch=3", f"--outdir={folder / name}", *words)
    return folder


def pixels(folder: Path) -> np.ndarray:
    files = sorted(folder.rglob("*.png"))
    assert len(files) == 8
    return np.stack([np.asarray(PIL.Image.open(file)).astype(int) for file in files])


def test_samples_are_upstreams_where_it_has_the_sampler(sampled):
    assert np.array_equal(pixels(sampled / "theirs"), pixels(sampled / "untouched"))
    assert np.abs(pixels(sampled / "heun") - pixels(sampled / "theirs")).max() <= 1
    assert np.abs(pixels(sampled / "guided") - pixels(sampled / "guided-theirs")).max() <= 1
    for other in ("euler", "guided"):
        assert np.abs(pixels(sampled / other) - pixels(sampled / "heun")).max() > 1
    with np.load(sampled / "heun.npz") as npz:
        assert np.array_equal(npz["arr_0"], pixels(sampled / "heun")) and npz["arr_1"].shape == (8,)


def test_a_snapshot_is_opened_as_the_script_samples_it(sampled, runs, patched):
    """By run/sampling.py, which run/solvers.sh and run/evaluate.sh use; the same noise and labels."""
    code = """if True:
        import sys
        from pathlib import Path
        import numpy as np
        import torch
        from run.sampling import open_network
        net = open_network(Path(sys.argv[1]), "cpu", third_party=Path(sys.argv[2]))
        with np.load(sys.argv[3]) as npz:
            theirs, labels = npz["arr_0"], torch.from_numpy(npz["arr_1"])
        assert net.classes > labels.unique().numel() > 1
        net.labels = lambda count: labels
        noise = [torch.randn(net.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
        ours = net.draw(torch.stack(noise), "heun", 7).permute(0, 2, 3, 1).numpy() * 127.5 + 127.5
        assert np.abs(ours - theirs).max() <= 1
    """
    python("-c", code, runs / "ogdm" / SNAPSHOT, patched("edm2").parent, sampled / "heun.npz")


def test_wrong_requests_and_hostile_files_are_refused(runs, patched, tmp_path):
    script, net = patched("edm2") / "generate_images.py", runs / "ogdm" / SNAPSHOT
    words = [script, f"--outdir={tmp_path}", "--sampler=heun"]
    said = python(*words, f"--net={net}", f"--gnet={net}", "--guidance=2", "--nfe=9", fails=True)
    assert "9 is not even; give 8 or 10" in said
    assert "nearest it can is 3 or 5" in python(*words, f"--net={net}", "--nfe=4", fails=True)
    bad, trace = tmp_path / "bad.pkl", tmp_path / "ran"
    bad.write_bytes(pickle.dumps({"ema": Call(trace)}))
    assert "--trust" in python(*words, f"--net={bad}", "--nfe=3", fails=True)
    assert not trace.exists()


def test_its_presets_train_continue_fine_tune_and_sample(patched, data, tmp_path, capfd):
    """By run/train.sh, with the smoke network in the place of upstream's."""
    from run import backbones
    from run.train.__main__ import main

    backbone = backbones.get("edm2")
    batch, images = backbone.small_images["smoke"]
    small = backbone.small_training("smoke", backbone.presets[0], "", 8, "") | {"--batch": batch}

    def go(words: str, out: str, **native) -> str:
        flags = [f"{name}={value}" for name, value in native.items()]
        argv = [*words.split(), "--third-party", str(patched("edm2").parent), "--out", str(tmp_path / out)]
        assert main([*argv, "--", *flags]) == 0
        return capfd.readouterr().out

    said = go(f"imagenet64-edm2-baseline --data {data}", "base", **small | {"--duration": images})
    assert "--preset=edm2-img64-s" in said.splitlines()[0] and "--ogdm" not in said.splitlines()[0]
    init = tmp_path / "base" / SNAPSHOT
    words = f"imagenet64-edm2-ogdm-ft --data {data} --init {init} --resume"
    tuned = small | {"--duration": images, "--ogdm-d-width": 0.02, "--ogdm-plain-end": 0}
    said = go(words, "tuned", **tuned)
    assert "learning rate is 0.0026 at once, and stays" in said and "the weights are those of" in said
    said = go(words, "tuned", **tuned | {"--duration": 2 * images})
    assert "continues with its discriminator" in said and "the weights are those of" not in said
    model = tmp_path / "tuned" / "network-snapshot-0000002-0.100.pkl"
    go(f"imagenet64-edm2-ogdm-ft --sample euler --nfe 3 --images 4 --model {model}", "samples")
    assert np.load(tmp_path / "samples" / "samples.npz")["arr_0"].shape == (4, 8, 8, 3)
