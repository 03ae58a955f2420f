"""CIFAR-10 and CelebA-64 preparation, on tiny archives made on the spot."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from run.data import celeba, cifar10
from run.data.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Five batches of four images, pickled as in 2009; the folder's parent and its pixels."""
    root, draw = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    (root / cifar10.FOLDER).mkdir()
    every = []
    for i in range(1, 6):
        pixels = draw.integers(0, 256, (4, 3072), dtype=np.uint8)
        batch = {b"data": pixels, b"labels": [i, 0, 9, i]}
        old = pickle.dumps(batch, protocol=2).replace(b"numpy._core.", b"numpy.core.")
        (root / cifar10.FOLDER / f"data_batch_{i}").write_bytes(old)
        every.append(pixels)
    with tarfile.open(root / cifar10.ARCHIVE, "w:gz") as tar:
        tar.add(root / cifar10.FOLDER, cifar10.FOLDER)
    return root, np.concatenate(every).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("source", [cifar10.ARCHIVE, cifar10.FOLDER, "."])
def test_cifar10_becomes_class_prefixed_images(cifar, source, tmp_path, capsys):
    root, pixels = cifar
    main(["cifar10", str(root / source), str(tmp_path), "--expect", "20"])
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(names) == 20 and names[0] == "airplane_00001.png"
    assert "20 images, 20 of them new" in capsys.readouterr().out
    assert sorted(cifar10.CLASSES) == list(cifar10.CLASSES)  # so upstream's labels are CIFAR-10's
    for path in tmp_path.glob("*.png"):
        name, number = path.stem.split("_")
        number = int(number)
        label = [number // 4 + 1, 0, 9, number // 4 + 1][number % 4]
        assert name == cifar10.CLASSES[label]
        assert np.array_equal(np.asarray(Image.open(path)), pixels[number])


def test_a_second_run_makes_only_what_is_missing(cifar, tmp_path, capsys):
    run = [str(cifar[0] / cifar10.ARCHIVE), str(tmp_path), "--expect", "20"]
    main(["cifar10", *run])
    kept, lost, *_ = sorted(tmp_path.glob("*.png"))
    before = kept.stat().st_mtime_ns
    lost.unlink()
    main(["cifar10", *run])
    assert "20 images, 1 of them new" in capsys.readouterr().out
    assert kept.stat().st_mtime_ns == before and Image.open(lost).size == (32, 32)
    assert len(list(tmp_path.iterdir())) == 22  # the images, their labels and their record


def test_cifar10_can_be_made_smaller_and_has_its_labels(cifar, tmp_path):
    root, pixels = cifar
    main(["cifar10", str(root / cifar10.ARCHIVE), str(tmp_path), "--expect", "20", "--size", "16"])
    labels = dict(json.loads((tmp_path / "dataset.json").read_text())["labels"])
    assert len(labels) == 20 and labels["airplane_00001.png"] == 0 and labels["truck_00002.png"] == 9
    mean = pixels[1].reshape(16, 2, 16, 2, 3).mean((1, 3))
    made = np.asarray(Image.open(tmp_path / "airplane_00001.png")).astype(float)
    assert made.shape == (16, 16, 3) and np.abs(made - mean).max() <= 1


def test_an_archive_with_other_images_is_not_cifar10(cifar, tmp_path, refused):
    with refused("data_batch_1 is not CIFAR-10's .*checksum.*--expect"):
        main(["cifar10", str(cifar[0] / cifar10.ARCHIVE), str(tmp_path)])


def test_counts_are_checked(cifar, tmp_path, refused):
    source = str(cifar[0] / cifar10.ARCHIVE)
    with refused("holds 20 images, not 21; check that the source"):
        main(["cifar10", source, str(tmp_path), "--expect", "21"])
    with refused("not 19; give an empty folder"):
        main(["cifar10", source, str(tmp_path), "--expect", "19"])
    with refused("begun as .*train.*give another folder"):
        main(["cifar10", source, str(tmp_path), "--split", "test"])


def test_cifar10_says_what_it_wants(tmp_path, refused):
    with refused("has no data_batch_1; expected cifar-10-batches-py"):
        main(["cifar10", str(tmp_path), str(tmp_path / "out")])
    (tmp_path / "data_batch_1").write_bytes(b"")
    with refused("neither cifar-10-python.tar.gz"):
        main(["cifar10", str(tmp_path / "data_batch_1"), str(tmp_path / "out")])


def face(number: int) -> Image.Image:
    """178x218, with red inside DDIM's crop, green inside the central square, blue elsewhere."""
    pixels = np.zeros((218, 178, 3), np.uint8)
    pixels[..., 2] = 255
    pixels[20:198] = (0, 255, 0)
    pixels[57:185, 25:153] = (255, number, 0)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    """torchvision's layout, with the zip and the folder."""
    root = tmp_path_factory.mktemp("faces")
    folder = root / "celeba" / celeba.FOLDER
    folder.mkdir(parents=True)
    with zipfile.ZipFile(root / "celeba" / celeba.ARCHIVE, "w") as archive:
        for number in range(1, 7):
            data = io.BytesIO()
            face(number).save(data, format="PNG")  # lossless, so that the crop shows exactly
            archive.writestr(f"{celeba.FOLDER}/{number:06d}.jpg", data.getvalue())
            (folder / f"{number:06d}.jpg").write_bytes(data.getvalue())
    return root


@pytest.mark.parametrize("source", ["celeba/img_align_celeba.zip", "celeba/img_align_celeba", "."])
def test_celeba_crops_as_ddim_does(faces, source, tmp_path):
    main(["celeba", str(faces / source), str(tmp_path), "--first", "6"])
    assert len(list(tmp_path.glob("*.png"))) == 6
    for number in range(1, 7):
        pixels = np.asarray(Image.open(tmp_path / f"{number:06d}.png"))
        assert pixels.shape == (64, 64, 3)
        assert (pixels == (255, number, 0)).all()  # the face, the whole face, nothing but the face


def test_celeba_centre_crop_and_size(faces, tmp_path, refused):
    flags = ["--first", "2", "--crop", "center", "--size", "89"]
    main(["celeba", str(faces), str(tmp_path), *flags])
    pixels = np.asarray(Image.open(tmp_path / "000001.png")).astype(int)
    assert pixels.shape == (89, 89, 3)
    assert (pixels[..., 2] < 20).all() and (pixels[:10] == (0, 255, 0)).all()
    assert json.loads((tmp_path / "prepared.json").read_text())["crop"] == "center"
    with refused("begun as .*center.*give another folder"):
        main(["celeba", str(faces), str(tmp_path), "--first", "2"])


def test_celeba_splits_and_errors(faces, tmp_path, refused):
    assert (len(celeba.SPLITS["train"]), len(celeba.SPLITS["all"])) == (162_770, 202_599)
    with refused("has no 000007.jpg; expected img_align_celeba, complete"):
        main(["celeba", str(faces), str(tmp_path / "a")])
    with pytest.raises(ValueError, match="is 64x64, not 178x218: take the aligned"):
        celeba.crop(Image.new("RGB", (64, 64)))


def test_download_goes_through_torchvision(cifar, tmp_path, monkeypatch, refused):
    asked = []
    datasets = types.SimpleNamespace(CIFAR10=lambda **kwargs: asked.append(kwargs))
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(datasets=datasets))
    main(["cifar10", str(cifar[0]), str(tmp_path / "a"), "--expect", "20", "--download"])
    assert asked == [{"root": str(cifar[0]), "download": True}]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with refused("leave --download out"):
        main(["cifar10", str(cifar[0]), str(tmp_path / "b"), "--download"])


@pytest.mark.slow
def test_the_script_dispatches_by_name(cifar, tmp_path):
    def run(*args):
        command = [str(ROOT / "run/prepare_data.sh"), *map(str, args)]
        env = os.environ | {"OGDM_PYTHON": sys.executable}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    done = run("cifar10", cifar[0] / cifar10.ARCHIVE, tmp_path, "--expect", 20)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.png"))) == 20
    done = run("cifar11")
    assert done.returncode == 2 and "invalid choice: 'cifar11'" in done.stderr
    assert "celeba|cifar10|folder|lsun" in run().stderr
    assert "162,770" in run("celeba", "--help").stdout
