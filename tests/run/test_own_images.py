"""Pictures of one's own, from a folder to what every backbone reads."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from ogdm_core import images as data_sets
from run.data.__main__ import main as prepare


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
    prepare(["folder", str(pictures), str(tmp_path / "out"), "--size", "32", "--no-classes"])
    assert len(list((tmp_path / "out").glob("00000?.png"))) == 9
