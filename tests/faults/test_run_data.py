"""Damaged data: every fault ends in one line that names the file and says what to do."""

import errno
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from ogdm_core import files
from ogdm_core.images import load
from run.data import celeba, cifar10, lsun
from run.data.__main__ import main
from run.evaluate.sources import open_source

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)


def png(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def npz(save=np.savez, **arrays) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def lying(save=np.savez) -> bytes:
    """An archive whose arr_0 says four images and holds one; another array follows."""
    data = npz(save, arr_0=PIXELS[:1], arr_1=np.arange(4), more=PIXELS)
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file := io.BytesIO(), "w") as new:
        for info in old.infolist():
            new.writestr(info, old.read(info).replace(b"(1, 8, 8, 3)", b"(4, 8, 8, 3)"), info.compress_type)
    return file.getvalue()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


WIDE = png(np.full((8, 8), 40_000, np.uint16))  # 16 bits: clipping would make it white
# A file of a folder of images, whose other one is good. All but "cut short" are found before training.
PICTURES = {
    "cut short": (png(PIXELS[0])[:60], "bad.png cannot be read as an image .*; remove it"),
    "16 bits": (WIDE, "bad.png has mode I;16; save it as 8-bit"),
    "no picture": (b"junk", "bad.png cannot be read as an image .*; remove it"),
    "empty": (b"", "bad.png cannot be read as an image"),
    "broken chunk": (flipped(png(PIXELS[0]), 14), "bad.png cannot be read as an image"),
}
ARRAYS = {
    "empty file": (b"", "bad.npz is not a readable npz .*; write it again"),
    "cut short": (npz(arr_0=PIXELS)[:300], "bad.npz is not a readable npz"),
    "no archive": (b"junk", "bad.npz is not a readable npz"),
    "packed, damaged": (
        flipped(npz(np.savez_compressed, arr_0=PIXELS), 200), "bad.npz is not a readable npz",
    ),
    "no images": (npz(arr_0=PIXELS[:0]), "bad.npz: arr_0 has shape"),
    "two channels": (npz(arr_0=PIXELS[..., :2]), r"must be \[N, H, W, C\]"),
    "rows": (npz(arr_0=PIXELS[:, 0, 0]), r"must be \[N, H, W, C\]"),
    "floats": (npz(arr_0=PIXELS / 255), r"arr_0 is float64.*astype\('uint8'\)"),
    "a label below 0": (npz(arr_0=PIXELS, arr_1=np.array([0, 1, -1, 2])), "bad.npz: .* from -1"),
    "a label of 2^40": (npz(arr_0=PIXELS, arr_1=np.array([0, 1, 2, 2**40])), "bad.npz: .* to 1099511627776"),
    "fewer than said": (lying(), r"bad.npz: arr_0 is said to be uint8 \(4, 8, 8, 3\), but it holds 192 bytes"),
    "fewer, packed": (lying(np.savez_compressed), "bad.npz: arr_0 is said to be uint8 .* write it again"),
    "labels missing": (npz(arr_0=PIXELS, arr_1=np.arange(3)), "bad.npz: labels must be 4 whole"),
    "labels in parts": (npz(arr_0=PIXELS, arr_1=np.ones(4)), "bad.npz: labels must be 4 whole"),
    "labels as objects": (npz(arr_0=PIXELS, arr_1=np.array([None] * 4)), "bad.npz: Object arrays"),
}  # fmt: skip
STATISTICS = {
    "another name": (npz(images=PIXELS), "bad.npz holds images; expected"),
    "NaN": (npz(mu=np.full(2, np.nan), sigma=np.eye(2)), "bad.npz: mu holds NaN"),
    "one bit": (flipped(npz(arr_0=PIXELS), 400), "bad.npz is not a readable npz .*checksum"),
    "words": (npz(mu=np.array(["x"]), sigma=np.eye(1)), "bad.npz: could not convert string"),
    "count": (npz(mu=np.ones(2), sigma=np.eye(2), images="x"), "bad.npz: invalid literal"),
    "objects": (npz(mu=np.array([None]), sigma=np.eye(1)), "bad.npz: Object arrays"),
    "sizes": (npz(mu=np.ones(3), sigma=np.eye(2)), r"bad.npz: mu \(3,\) and sigma \(2, 2\)"),
}


def cases(faults):
    return pytest.mark.parametrize(("data", "says"), faults.values(), ids=faults)


@cases(PICTURES)
def test_pictures(tmp_path, data, says):
    (tmp_path / "a.png").write_bytes(png(PIXELS[0]))
    (tmp_path / "bad.png").write_bytes(data)
    late = data == PICTURES["cut short"][0]
    for opens in (lambda: load(str(tmp_path)), lambda: open_source(tmp_path).images):
        images = opens() if late else None
        with pytest.raises(ValueError, match=says):
            images.all() if images else opens()
    with pytest.raises(ValueError, match=says):
        lsun.prepare(tmp_path, tmp_path / "out", expect=None)


def test_a_grey_picture_among_others_is_found_before_training(tmp_path):
    (tmp_path / "a.png").write_bytes(png(PIXELS[0]))
    (tmp_path / "b.png").write_bytes(png(PIXELS[0, :, :, 0]))
    with pytest.raises(ValueError, match="b.png is 8x8 with 1 channels, but a.png is 8x8 with 3"):
        load(str(tmp_path))


def test_pictures_of_several_sizes_want_a_size(tmp_path):
    (tmp_path / "a.png").write_bytes(png(PIXELS[0]))
    (tmp_path / "b.png").write_bytes(png(PIXELS[0, :, :6]))
    with pytest.raises(ValueError, match="a.png and b.png are of 8 and 6 pixels; bring them to one"):
        load(str(tmp_path))
    assert load(str(tmp_path), 4).all().shape == (2, 3, 4, 4)


def test_what_is_no_picture_of_the_users_is_skipped(tmp_path):
    (tmp_path / "a.png").write_bytes(png(PIXELS[0]))
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "fifo.png")
    writer = threading.Thread(target=(tmp_path / "fifo.png").write_bytes, args=[b"junk"], daemon=True)
    writer.start()  # without it a reader would hang
    for hidden in (tmp_path / "._a.png", tmp_path / ".ipynb_checkpoints" / "a-checkpoint.png"):
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_bytes(png(PIXELS[1]))
    images = load(str(tmp_path))
    assert [file.name for file in images.files] == ["a.png"] and images.classes == 0
    assert (tmp_path / "fifo.png").read_bytes() == b"junk"
    (tmp_path / "lost.png").symlink_to("nowhere")
    with pytest.raises(ValueError, match="lost.png cannot be read"):
        load(str(tmp_path))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_photo_is_turned_as_its_exif_says(tmp_path, damaged):
    picture, exif = Image.fromarray(PIXELS[0]), Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter, clockwise
    data = b"Exif\0\0junk" if damaged else exif.tobytes()
    picture.save(tmp_path / "a.webp", lossless=True, exif=data)
    expected = PIXELS[0] if damaged else np.rot90(PIXELS[0], -1)
    for images in (load(str(tmp_path)), open_source(tmp_path).images):
        assert np.array_equal(images.pixels(torch.zeros(1, dtype=int))[0].permute(1, 2, 0), expected)


def test_no_room_to_unpack_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.npz").write_bytes(npz(np.savez_compressed, arr_0=PIXELS))
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(ValueError, match="a.npz: no room in .*set TMPDIR to a folder with more"):
        load(str(tmp_path / "a.npz"))


@cases(ARRAYS)
def test_arrays(tmp_path, data, says):
    (tmp_path / "bad.npz").write_bytes(data)
    for reads in (load, open_source):
        with pytest.raises(ValueError, match=says):
            reads(str(tmp_path / "bad.npz"))


@cases(STATISTICS)
def test_what_the_evaluator_reads(tmp_path, data, says):
    (tmp_path / "bad.npz").write_bytes(data)
    with pytest.raises(ValueError, match=says):
        open_source(tmp_path / "bad.npz")


def batch(**changed) -> bytes:
    good = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
    good |= {key.encode(): value for key, value in changed.items()}
    return pickle.dumps({k: v for k, v in good.items() if v is not None}, protocol=2)


BATCHES = {
    "empty": b"", "cut short": batch()[:90], "no labels": batch(labels=None),
    "no dict": pickle.dumps([1]), "code": pickle.dumps(subprocess.run),
    "label 99": batch(labels=[0, 99]), "label -1": batch(labels=[0, -1]),
    "few labels": batch(labels=[0]), "other pixels": batch(data=np.zeros((2, 7), np.uint8)),
}  # fmt: skip


@pytest.mark.parametrize("data", BATCHES.values(), ids=BATCHES)
def test_cifar10s_batches(tmp_path, data, refused):
    (tmp_path / "data_batch_1").write_bytes(data)
    with refused(r"data_batch_1 is no batch of CIFAR-10 \((?!.*--trust).*; get it again"):
        main(["cifar10", str(tmp_path), str(tmp_path / "out")])


def test_an_archive_cut_short_by_a_broken_download(tmp_path, refused):
    random = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8).tobytes()
    whole = tmp_path / "whole"
    with tarfile.open(whole, "w:gz") as tar:
        info = tarfile.TarInfo(f"{cifar10.FOLDER}/data_batch_1")
        info.size = len(random)
        tar.addfile(info, io.BytesIO(random))
    (tmp_path / cifar10.ARCHIVE).write_bytes(whole.read_bytes()[:100_000])
    with refused(f"{cifar10.ARCHIVE} is damaged .*; get it again"):
        main(["cifar10", str(tmp_path), str(tmp_path / "out")])


def test_celeba_names_the_picture(tmp_path, refused):
    with zipfile.ZipFile(tmp_path / celeba.ARCHIVE, "w") as archive:
        archive.writestr(f"{celeba.FOLDER}/000001.jpg", b"junk")
    with refused("000001.jpg cannot be read as an image"):
        main(["celeba", str(tmp_path), str(tmp_path / "out"), "--first", "1"])


@pytest.mark.parametrize("text", ["", '{"dataset": "Cel', "[]"])
def test_a_damaged_record_of_a_preparation(tmp_path, text, refused):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "prepared.json").write_text(text)
    (tmp_path / celeba.FOLDER).mkdir()
    with refused("prepared.json is damaged|was begun as .*another folder"):
        main(["celeba", str(tmp_path), str(tmp_path / "out"), "--first", "1"])


def test_a_database_that_is_none(tmp_path):
    pytest.importorskip("lmdb")
    (tmp_path / "data.mdb").write_bytes(b"junk" * 5000)
    with pytest.raises(ValueError, match="data.mdb is damaged or no LMDB .*; download it again"):
        lsun.prepare(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("write", ["file.write(bytes(9**6))", "torch.save(torch.ones(9**6), file)"])
def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path, write):
    """A limit on the size of files stands in for a disk that is full."""
    file = tmp_path / "result.json"
    files.write_json(file, "before")
    code = (
        "import resource, sys, torch\nfrom ogdm_core.files import atomic_write\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        f"with atomic_write(sys.argv[1]) as file:\n    {write}\n"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.endswith(f"File too large: '{file}'"), done.stderr
    assert json.loads(file.read_text()) == "before" and list(tmp_path.iterdir()) == [file]
