"""Pictures of one's own, from a folder to what every backbone reads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from ogdm_core import images as data_sets
from run import backbones
from run.data.__main__ import main as prepare
from run.provenance import ROOT


def picture(path, width, height, mode="RGB", **options):
    """A picture whose upper left quarter is white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((height, width), np.uint8)
    pixels[: height // 2, : width // 2] = 255
    Image.fromarray(pixels).convert(mode).save(path, **options)


@pytest.fixture
def pictures(tmp_path):
    """Two classes: any sizes, grey and colour, one turned by EXIF, one transparent; and what is of no use."""
    turned = Image.Exif()
    turned[0x112] = 6  # to be shown turned by 90 degrees to the right
    for i in range(6):
        picture(tmp_path / "in" / "big_cats" / f"{i}.png", 40 + 9 * i, 50, "L" if i == 2 else "RGB")
    picture(tmp_path / "in" / "dogs" / "turned.jpg", 48, 48, exif=turned, quality=95)
    Image.new("RGBA", (40, 40), (255, 0, 0, 0)).save(tmp_path / "in" / "dogs" / "clear.png")
    picture(tmp_path / "in" / "dogs" / "small.png", 20, 60)
    (tmp_path / "in" / "dogs" / "cut.png").write_bytes((tmp_path / "in" / "dogs" / "small.png").read_bytes()[:60])
    (tmp_path / "in" / "dogs" / "notes.txt").write_text("not a picture")
    (tmp_path / "in" / ".hidden.png").write_text("skipped")
    return tmp_path / "in"


def test_a_folder_of_any_pictures_becomes_what_every_backbone_reads(pictures, tmp_path, capsys):
    out = tmp_path / "out"
    prepare(["folder", str(pictures), str(out), "--size", "32"])
    said = capsys.readouterr().out
    assert "left out 3 files" in said and "dogs/small.png is 20x60, smaller than 32" in said
    assert "8 images, 8 of them new" in said and "2 classes: big-cats 6, dogs 2" in said
    kept = (out / "left-out.txt").read_text()
    assert "dogs/cut.png cannot be read" in kept and "notes.txt has no suffix of a picture" in kept
    names = sorted(path.name for path in out.glob("*.png"))
    assert names[0] == "big-cats_000000.png" and names[-1] == "dogs_000007.png"  # ADM: the class ends at the first _
    labels = json.loads((out / "dataset.json").read_text())["labels"]  # EDM
    assert labels == [[name, int(name.startswith("dogs"))] for name in names]
    images = data_sets.load(str(out))  # the trainer for diffusers models
    assert images.shape == (3, 32, 32) and len(images) == 8
    reference = data_sets.load(str(out / "reference.npz"))
    assert np.array_equal(reference.all(), images.all()) and reference.labels.tolist() == [n for _, n in labels]
    config = yaml.safe_load((out / "ldm.yaml").read_text())["data"]["params"]  # LDM
    for part, flip in (("train", None), ("validation", 0.0)):
        said = config[part]["params"]
        assert config[part]["target"] == "ldm.data.lsun.LSUNBase" and said.get("flip_p") == flip
        listed = Path(said["txt_file"]).read_text().splitlines()
        assert sorted(listed) == names and said["data_root"] == str(out)
    clear, turned = (np.asarray(Image.open(out / name)) for name in names[-2:])
    assert (clear == 255).all()  # what is transparent is white
    assert turned[:12, 20:].min() > 200 and turned[:12, :12].max() < 50  # white at the upper right
    prepare(["folder", str(pictures), str(out), "--size", "32"])  # again: nothing new
    assert "8 images, 0 of them new" in capsys.readouterr().out


def test_grey_pictures_stay_grey_and_small_ones_are_taken_on_request(tmp_path, capsys):
    picture(tmp_path / "in" / "a.png", 20, 20, "L")
    picture(tmp_path / "in" / "b.png", 64, 40, "1")
    prepare(["folder", str(tmp_path / "in"), str(tmp_path / "out"), "--size", "32", "--enlarge"])
    assert data_sets.load(str(tmp_path / "out")).shape == (1, 32, 32)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text()) == {"labels": None}
    assert data_sets.load(str(tmp_path / "out" / "reference.npz")).labels is None
    assert not (tmp_path / "out" / "left-out.txt").exists() and "left out" not in capsys.readouterr().out


REFUSED = {
    "--size: 48 is not allowed; give a power of two": lambda p: ["folder", p, "out", "--size", "48"],
    "nowhere is no folder": lambda p: ["folder", "nowhere", "out", "--size", "32"],
    "is inside": lambda p: ["folder", p, f"{p}/out", "--size", "32"],
    "none of the 10 pictures can be taken, such as big_cats/0.png is 40x50": lambda p: [
        "folder", p, "out", "--size", "4096"],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(pictures, tmp_path, monkeypatch, refused, message):
    monkeypatch.chdir(tmp_path)
    with refused(message):
        prepare(REFUSED[message](str(pictures)))


def test_a_picture_beside_the_class_folders_is_not_guessed_at(pictures, tmp_path, refused):
    picture(pictures / "loose.png", 50, 50)
    with refused("1 pictures are beside the class folders"):
        prepare(["folder", str(pictures), str(tmp_path / "out"), "--size", "32"])
    argv = ["folder", str(pictures), str(tmp_path / "out"), "--size", "32", "--no-classes"]
    prepare(argv)
    assert len(list((tmp_path / "out").glob("00000?.png"))) == 9
    (pictures / "loose.png").unlink()
    prepare([*argv[:2], str(tmp_path / "two"), *argv[3:5]])
    with refused("give another folder"):
        prepare([*argv[:2], str(tmp_path / "two"), *argv[3:]])


# ---- the page's commands, in small ---------------------------------------------------------------

# What a test puts in the place of the page's words; each must be on the page.
SMALLER = {
    "--size 32": "--size 8",
    "--channels 64,128,128 --layers 2 --steps 50000": "--channels 8,8 --steps 2 --batch-size 4",
    "--steps 5000 --keep-every 1000": "--steps 2 --keep-every 1 --batch-size 4",
    "-n 4 ": "-n 1 ",
    "--image_size 32 --num_channels 128 --num_res_blocks 3 --attention_resolutions 16,8": "--image_size 8 "
    "--num_channels 32 --num_res_blocks 1 --channel_mult 1,1 --diffusion_steps 50 --attention_resolutions 4",
    "--batch_size 32 --lr_anneal_steps 100000 --grid_interval 5000": "--batch_size 4 --lr_anneal_steps 2 "
    "--save_interval 1 --log_interval 1 --grid_interval 1 --grid_nfe 3",
    "--dropout 0.1 --batch_size 32 --lr_anneal_steps 10000 --save_interval 1000": "--batch_size 4 --lr_anneal_steps 2 "
    "--save_interval 1 --log_interval 1",
    "ema_0.9999_100000.pt": "ema_0.9999_000001.pt",
    "--nproc_per_node=4": "--nproc_per_node=1",
    "--arch=ddpmpp --duration=20 --grid-ticks=10": "--arch=ddpmpp --duration=0.001 --batch=100 --cbase=8 --cres=1 "
    "--blocks=1 --tick=1 --snap=1 --workers=1 --grid-ticks=1 --grid-nfe=3",
    "--arch=ddpmpp --duration=2 --lr-rampup=0 --tick=50 --snap=4": "--arch=ddpmpp --duration=0.001 --batch=100 "
    "--cbase=8 --cres=1 --blocks=1 --lr-rampup=0 --tick=1 --snap=1 --workers=1",
    "network-snapshot-020000.pkl": "network-snapshot-000001.pkl",
    "network-snapshot-002000.pkl": "network-snapshot-000001.pkl",
    "--size 256": "--size 16 --enlarge",
    "data/mine-256/ldm.yaml": "data/mine-256/ldm.yaml SMALL.yaml",
    "--gpus 0,1 ": "",
    "every_n_train_steps: 1000": "every_n_train_steps: 1",
    "--max_steps 50000": "--max_steps 1",
    "--max_steps 5000": "--max_steps 2",
    "--nfe 10 --count 10000": "--nfe 3 --count 8",
    "--weights INCEPTION.pth": "--features pixels",
    "--seeds=0-9999": "--seeds=0-7",
    "--nfe 5 10 20": "--nfe 4 5 --drift-images 2",
}


def page_commands():
    """The page's commands, but for setup, as a script."""
    page = (ROOT / "docs" / "own-images.md").read_text()
    for old, new in SMALLER.items():
        assert old in page, old
        page = page.replace(old, new)
    lines = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("run/setup.sh", "source ")))


def small_ldm(path):
    """The smoke rows' network for pictures of 16x16, without their data."""
    config = yaml.safe_load((ROOT / "run" / "backbones" / "ldm_smoke.yaml").read_text())
    params = config["model"]["params"]
    params["image_size"] = params["unet_config"]["params"]["image_size"] = 8
    params["first_stage_config"]["params"]["ddconfig"]["resolution"] = 16
    path.write_text(yaml.safe_dump(config | {"data": {"params": {"batch_size": 4, "num_workers": 0}}}))


@pytest.mark.slow
def test_the_pages_commands_lead_from_pictures_to_a_curve_on_every_backbone(tmp_path, submodule):
    for backbone in map(backbones.get, ("adm", "edm", "ldm")):
        submodule(backbone.folder)
        if problem := backbone.not_ready(ROOT / "third_party"):
            pytest.skip(problem)
    for i in range(120):
        picture(tmp_path / "IMAGES" / f"{i}.png", 10 + i % 7, 12, "L" if i % 5 == 0 else "RGB")
    small_ldm(tmp_path / "small.yaml")
    script = f"set -euo pipefail\n{page_commands()}".replace(" IMAGES ", f" {tmp_path}/IMAGES ")
    script = script.replace(" SMALL.yaml", f" {tmp_path}/small.yaml")
    script = re.sub(r"(?<![\w.])(?:\.\./\.\./)?(out/|data/mine)", rf"{tmp_path}/\1", script)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "OGDM_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "out"
    for name in ("ogdm.png", "adm.png", "edm.png", "ldm.png", "figures/fig1.png", "adm/flags.json"):
        assert (out / name).is_file(), sorted(out.rglob("*"))
    assert len(list((out / "adm" / "grids").glob("*.png"))) == 2 == len(list((out / "edm" / "grids").glob("*.png")))
    assert {p.parent.name for p in out.glob("ogdm/snapshot-*/unet")} == {"snapshot-000001", "snapshot-000002"}
    assert done.stdout.count("  FID ") == 4 * 2  # snapshots of each
    assert "D: light" in done.stdout


def test_latent_diffusion_reads_the_config_without_trust(pictures, tmp_path, submodule):
    home = submodule("latent-diffusion").path
    prepare(["folder", str(pictures), str(tmp_path / "out"), "--size", "32"])
    code = (
        "import sys; from ogdm_core.ldm import compat; compat.install(); from omegaconf import OmegaConf; "
        "from ldm.util import instantiate_from_config as make; "
        "c = OmegaConf.merge(*map(OmegaConf.load, sys.argv[1:])); "
        "print([(len(d), d[0]['image'].shape) for d in map(make, (c.data.params.train, c.data.params.validation))])"
    )
    base = "configs/latent-diffusion/lsun_churches-ldm-kl-8.yaml"
    command = [sys.executable, "-c", code, base, str(tmp_path / "out" / "ldm.yaml")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True)
    assert "[(8, (32, 32, 3)), (8, (32, 32, 3))]" in done.stdout, done.stderr[-2000:]
