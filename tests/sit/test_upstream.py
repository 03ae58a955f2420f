"""OGDM in the real willisma/SiT, on digits, tiny transformers and a tiny autoencoder."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SIZES = {"depth": 2, "hidden_size": 24, "num_heads": 2}
NET = ["--image-size=64", "--model=SiT-S/2", "--num-classes=10", "--depth=2", "--hidden-size=24", "--num-heads=2"]
OGDM = ["--ogdm", "--ogdm-d-width=0.02", "--ogdm-plain-end=0"]
SHORT = ["--epochs=2", "--global-batch-size=20", "--num-workers=0", "--log-every=1", "--ckpt-every=2"]


@pytest.fixture(scope="module", autouse=True)
def packages():
    pytest.importorskip("torchdiffeq", reason="run/setup.sh sit installs what SiT needs")


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """Sixty real digits as RGB images by class, and an autoencoder with random weights."""
    from diffusers.models import AutoencoderKL

    folder, digits = tmp_path_factory.mktemp("sit"), load_digits()
    for i in range(60):
        place = folder / "images" / str(digits.target[i])
        place.mkdir(parents=True, exist_ok=True)
        pixels = PIL.Image.fromarray((digits.images[i] / 16 * 255).round().astype(np.uint8))
        pixels.convert("RGB").resize((64, 64)).save(place / f"{i}.png")
    for seed, name in enumerate(("vae", "other-vae")):
        torch.manual_seed(seed)
        AutoencoderKL(
            block_out_channels=[8] * 4, down_block_types=["DownEncoderBlock2D"] * 4, layers_per_block=1,
            up_block_types=["UpDecoderBlock2D"] * 4, norm_num_groups=4, latent_channels=4,
        ).save_pretrained(folder / name)  # fmt: skip
    return folder


def drive(clone: Path, folder: Path, *cases, ranks: int = 0) -> list[str]:
    """What each case printed."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    alone = {} if ranks else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                              "MASTER_PORT": "0"}  # fmt: skip
    env = os.environ | alone | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *torchrun, HERE / "sit_drive.py", clone, file], env=env, text=True,
                          cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.splitlines()


def words(house: Path, out: str, *more: str) -> list:
    place = [f"--data-path={house / 'images'}", f"--results-dir={house / out}", f"--vae={house / 'vae'}"]
    return ["train", [*place, *NET, *SHORT, *more]]


def checkpoints(house: Path, out: str) -> Path:
    (found,) = (house / out).glob("*/checkpoints")
    return found


@pytest.fixture(scope="module")
def runs(patched, pristine, house) -> Path:
    settings = {
        "data_path": str(house / "images"), "results_dir": str(house / "pristine"), "vae": str(house / "vae"),
        "model": "SiT-S/2", "image_size": 64, "num_classes": 10, "epochs": 2, "global_batch_size": 20, "ckpt_every": 2,
        "sizes": SIZES,
    }  # fmt: skip
    drive(pristine("SiT"), house, ["untouched", settings])
    heun = [*OGDM, "--ogdm-projection=heun"]
    drive(
        patched("SiT"), house, words(house, "plain"), words(house, "ogdm", *heun),
        words(house, "gvp", *OGDM, "--path-type=GVP", "--prediction=noise", f"--latents={house / 'latents'}"),
        words(house, "score", *OGDM, "--prediction=score", f"--latents={house / 'latents'}", "--ema=0"),
    )  # fmt: skip
    shutil.rmtree(house / "resumed", ignore_errors=True)
    first = checkpoints(house, "ogdm") / "0000002.pt"
    drive(patched("SiT"), house, words(house, "resumed", *heun, f"--ckpt={first}"))
    return house


def load(path: Path) -> dict:
    """A checkpoint of upstream's or a state of ours, flat."""
    found = torch.load(path, weights_only=False)

    def flat(value, name=""):
        if isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            return {k: v for key, item in pairs for k, v in flat(item, f"{name}/{key}").items()}
        return {name: value}

    return flat(found)


def same(a: Path, b: Path, without: str = "results_dir") -> bool:
    ours, theirs = load(a), load(b)
    args = [vars(found.pop("/args")) if "/args" in found else {} for found in (ours, theirs)]
    for found in args:
        found.pop(without, None), found.pop("num_heads", None)  # a flag of ours, where it was given
    equal = [torch.equal(v, theirs[n]) if isinstance(v, torch.Tensor) else v == theirs[n]
             for n, v in ours.items() if "files" not in n]  # fmt: skip
    return ours.keys() == theirs.keys() and args[0] == args[1] and all(equal)


def test_without_flags_it_is_upstream_bit_for_bit(runs):
    for step in (2, 6):
        name = f"{step:07d}.pt"
        assert same(checkpoints(runs, "plain") / name, checkpoints(runs, "pristine") / name)
        assert not same(checkpoints(runs, "ogdm") / name, checkpoints(runs, "plain") / name)


def test_a_resumed_run_is_one_that_never_stopped(runs):
    """From the middle of an epoch; network, average, optimiser, D and its optimiser."""
    for name in ("0000004.pt", "0000006.pt", "ogdm-0000006.pt"):
        assert same(checkpoints(runs, "resumed") / name, checkpoints(runs, "ogdm") / name), name


def test_the_average_has_the_decay_of_its_flag(runs):
    state = torch.load(checkpoints(runs, "score") / "0000006.pt", weights_only=False)
    assert all(torch.equal(state["ema"][name], weight) for name, weight in state["model"].items())


def test_another_batch_goes_on_at_the_same_image(runs, patched):
    """Behind two steps of 20 images there are two steps of 10 left in an epoch of 60; six make the next.

    A resume in the first epoch, between the two or in the second goes on as the run does. All end plain, for 2 of 10.
    """

    def case(out: str, first: Path) -> list:
        more = ["--ogdm-plain-end=0.2", "--global-batch-size=10", "--ckpt-every=1", f"--ckpt={first}"]
        return words(runs, out, *OGDM, *more)

    folder = runs / "rebatched" / "000-SiT-S-2-Linear-velocity-None" / "checkpoints"
    said = drive(patched("SiT"), runs, case("rebatched", checkpoints(runs, "ogdm") / "0000002.pt"),
                 *(case(f"again{step}", folder / f"{step:07d}.pt") for step in (3, 4, 6)))  # fmt: skip
    assert said.count("OGDM: --global-batch-size was 20; the run goes on behind 40 images of epoch 0") == 1
    observed = ["emission" in line for line in said if "skipped" in line]
    assert observed == [step < 8 for first in (2, 3, 4, 6) for step in range(first, 10)]
    assert max(p.name for p in folder.glob("0*")) == "0000010.pt"
    for out in ("again3", "again4", "again6"):
        assert max(p.name for p in checkpoints(runs, out).glob("0*")) == "0000010.pt"
        for name in ("0000010.pt", "ogdm-0000010.pt"):
            assert same(checkpoints(runs, out) / name, folder / name), (out, name)


def test_two_ranks_stay_together(runs, patched):
    """They draw upstream's own samples, too, of a network with fewer classes than ImageNet's."""
    case = words(runs, "two", *OGDM, "--ogdm-projection=heun", "--sample-every=6")
    assert "Generating EMA samples done." in "".join(drive(patched("SiT"), runs, case, ranks=2))
    assert (checkpoints(runs, "two") / "ogdm-0000006.pt").is_file()


def test_formulas_and_labels_are_upstreams(patched, house):
    said = drive(patched("SiT"), house, ["checks", []])
    text = (
        "OGDM: FILE does not say how many attention heads it has; 2 are taken (upstream's models of this width have 6)"
    )
    assert text in said and "REFUSED" not in "".join(said), said


def test_latents_on_disk_are_the_autoencoders(runs):
    from diffusers.models import AutoencoderKL

    moments, about = np.load(runs / "latents" / "latents.npy"), json.loads((runs / "latents/latents.json").read_text())
    assert moments.shape == (60, 2, 8, 8, 8) and about["image_size"] == 64
    vae = AutoencoderKL.from_pretrained(runs / "vae")
    first = next(path for path in sorted((runs / "images" / "0").iterdir()))
    x = torch.from_numpy(np.array(PIL.Image.open(first))).permute(2, 0, 1)[None].float() / 127.5 - 1
    for mirrored, image in enumerate((x, x.flip(3))):
        with torch.no_grad():
            found = vae.encode(image).latent_dist.parameters
        torch.testing.assert_close(torch.from_numpy(moments[0, mirrored])[None], found, atol=1e-4, rtol=1e-4)


def test_a_trained_model_loads_in_untouched_code(runs, pristine):
    """Upstream's own loading of a checkpoint, and its own network."""
    code = """if True:
        import sys
        from ogdm_core.sit import compat
        compat.install()
        from download import find_model
        import models
        net = models.SiT(input_size=8, patch_size=2, hidden_size=24, depth=2, num_heads=2, num_classes=10)
        print(net.load_state_dict(find_model(sys.argv[1])))
    """
    command = [sys.executable, "-c", code, checkpoints(runs, "ogdm") / "0000006.pt"]
    env = os.environ | {"PYTHONPATH": f"{pristine('SiT')}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=runs)
    assert "All keys matched" in done.stdout, done.stderr


def test_a_checkpoint_is_opened_as_upstream_samples_it(runs, patched):
    drive(patched("SiT"), runs, ["opened", str(checkpoints(runs, "ogdm") / "0000006.pt")])


def pixels(folder: Path) -> np.ndarray:
    files = sorted(folder.rglob("*.png"))
    return np.stack([np.asarray(PIL.Image.open(file)).astype(int) for file in files])


def test_samples_by_name(runs, patched):
    """On the linear path Euler's method is upstream's, whose N points of time are N - 1 steps."""
    usual = [*NET, f"--vae={runs / 'vae'}", "--num-fid-samples=4", "--per-proc-batch-size=4"]
    usual += [f"--ckpt={checkpoints(runs, 'ogdm') / '0000006.pt'}"]

    def case(out: str, *more: str) -> list:
        return ["sample", ["ODE", *usual, f"--sample-dir={runs / out}", *more]]

    drive(
        patched("SiT"), runs, case("theirs", "--sampling-method=euler", "--num-sampling-steps=9"),
        case("ours", "--sampler=euler", "--nfe=8"), case("heun", "--sampler=heun", "--nfe=7"),
        case("guided", "--sampler=euler", "--nfe=16", "--cfg-scale=3"),
    )  # fmt: skip
    assert np.abs(pixels(runs / "ours") - pixels(runs / "theirs")).max() <= 2
    assert [folder.name.split("cfg")[1] for folder in (runs / "guided").iterdir() if folder.is_dir()] == [
        "-3.0-4-ODE-8-euler"
    ]
    assert all(len(pixels(runs / name)) == 4 for name in ("heun", "guided"))
    (npz,) = (runs / "heun").glob("*.npz")
    with np.load(npz) as images:
        assert images["arr_0"].shape == (4, 64, 64, 3)


def test_bad_input_is_refused_by_name(runs, patched):
    first = checkpoints(runs, "ogdm") / "0000002.pt"
    lost = runs / "lost" / "0000002.pt"
    lost.parent.mkdir()
    shutil.copy(first, lost)
    torch.save({"a": Call(runs / "ran")}, runs / "bad.pt")
    few = [flag if flag != "--num-classes=10" else "--num-classes=3" for flag in words(runs, "x", *OGDM)[1]]
    sample = ["ODE", *NET, f"--vae={runs / 'vae'}", "--sampler=euler"]
    said = "\n".join(drive(
        patched("SiT"), runs,
        words(runs, "x", *OGDM, f"--ckpt={lost}"),
        words(runs, "x", *OGDM, "--path-type=VP"),
        words(runs, "x", f"--init={first}", "--prediction=noise"),
        words(runs, "x", f"--init={first}", "--hidden-size=48"),
        words(runs, "x", f"--init={first}", "--num-heads=3"),
        words(runs, "x", f"--init={runs / 'bad.pt'}"),
        words(runs, "x", f"--vae={runs / 'other-vae'}", f"--latents={runs / 'latents'}"),
        words(runs, "x", f"--vae={runs / 'none'}"),
        ["train", few],
        ["sample", [*sample, f"--ckpt={first}", "--cfg-scale=2", "--nfe=5"]],
        ["sample", [*sample, f"--ckpt={first}", "--sampling-method=euler"]],
        ["sample", [*sample, f"--ckpt={first}", "--num-heads=4"]],
    ))  # fmt: skip
    for text in (
        "ogdm-0000002.pt is missing", "VP has no schedule here; give one of Linear, GVP", "prediction: velocity there",
        "is of another network (size mismatch", "bad.pt is damaged, or no checkpoint", "holds latents of another auto",
        "none is no autoencoder that can be had", "has 10 classes, one per folder, and the network 3",
        "5 is not even; give 4 or 6", "--sampling_method steers upstream's own sampler",
        "num_heads: 2 there, 3 here", "num_heads: 2 there, 4 here",
    ):  # fmt: skip
        assert text in said, (text, said[-4000:])
    assert not (runs / "ran").exists()


class Call:
    """Pickles as a call that the reader is asked to make."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def test_its_presets_train_continue_and_sample(runs, patched, capfd, monkeypatch):
    """By run/train.sh, with the smoke network in the place of upstream's."""
    from run import backbones
    from run.train.__main__ import main

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    backbone = backbones.get("sit")
    batch, images = backbone.small_images["smoke"]
    preset = replace(backbone.presets[0], batch=batch, images=images)
    small = backbone.small_training("smoke", preset, "", 32, "") | {"--image-size": 64, "--vae": runs / "vae"}

    def go(request: str, out: str, *native: str) -> str:
        argv = [*request.split(), "--third-party", str(patched("SiT").parent), "--out", str(runs / out)]
        assert main([*argv, "--", *native]) == 0
        return capfd.readouterr().out

    flags = [str(word) for flag in small.items() for word in flag] + ["--global-batch-size", str(batch)]
    request = f"imagenet256-sit-ogdm-ft --data {runs / 'images'} --init {checkpoints(runs, 'plain') / '0000006.pt'}"
    line = go(f"{request} --resume", "tuned", *flags, *OGDM[1:]).splitlines()[0]
    assert "--init" in line and "--ogdm True" in line and "--ckpt " not in line
    model = checkpoints(runs, "tuned") / "0000002.pt"
    line = go(f"{request} --resume --dry-run", "tuned")
    assert f"--ckpt {model}" in line and "--init" not in line
    sizes = [word for name in ("model", "image-size", "num-classes", "depth", "hidden-size", "num-heads", "vae")
             for word in (f"--{name}", str(small[f"--{name}"]))]  # fmt: skip
    request = f"imagenet256-sit-ogdm-ft --sample euler --nfe 2 --images 4 --model {model}"
    go(request, "by-preset", *sizes, "--per-proc-batch-size", "4")
    (npz,) = (runs / "by-preset").glob(backbone.samples)
    with np.load(npz) as images:
        assert images["arr_0"].shape == (4, 64, 64, 3)
