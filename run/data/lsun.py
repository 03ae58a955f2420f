"""LSUN-Church in the layout that latent-diffusion reads, from LSUN's archives or a folder of images."""

import argparse
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ogdm_core.cli import bar_interval
from ogdm_core.files import atomic_write, write_text
from ogdm_core.images import SUFFIXES, open_image

from .flags import LSUN_COUNT

VAL_COUNT = 300  # images in church_outdoor_val_lmdb
SIGNATURES = {b"RIFF": ".webp", b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png"}


def prepare(source: Path, out: Path, val: Path | None = None, expect: int | None = LSUN_COUNT) -> tuple[int, int]:
    """Writes the images and their lists; returns the numbers of training and validation images.

    source   LSUN's training archive: a zip, an LMDB folder, or a folder of images
    val      its validation archive
    expect   the number of training images there must be; None for any
    """
    (out / "churches").mkdir(parents=True, exist_ok=True)
    train_list = _images(source, out / "churches", "train")
    if expect is not None and len(train_list) != expect:
        raise ValueError(
            f"{source}: {len(train_list):,} images, not {expect:,}; check that the download is "
            "complete, or accept another number with --count N (--count any)"
        )
    if val is not None:
        val_list = _images(val, out / "churches", "val")
    else:
        few = min(VAL_COUNT, len(train_list))
        val_list = [train_list[i * len(train_list) // few] for i in range(few)]
    for split, lines in (("train", train_list), ("val", val_list)):
        write_text(out / f"church_outdoor_{split}.txt", "".join(f"{line}\n" for line in lines))
    return len(train_list), len(val_list)


def link(out: Path, upstream: Path) -> bool:
    """Makes upstream's data/lsun point to `out`; False where something else is there already."""
    place = upstream / "data" / "lsun"
    if place.exists() and place.resolve() == out.resolve():
        return True
    if not (upstream / "data").is_dir() or place.exists() or place.is_symlink():
        return False
    place.symlink_to(out.resolve(), target_is_directory=True)
    return True


def _images(source: Path, out: Path, name: str) -> list[str]:
    """Brings the images of `source` to `out`/`name`; their paths relative to `out`, sorted."""
    if not source.exists():
        raise ValueError(
            f"{source} is not there; LSUN's download script is at https://github.com/fyu/lsun "
            "(python3 download.py -c church_outdoor)"
        )
    unpacked = out / f".{name}_lmdb"
    if source.is_file():
        source = _unzip_lmdb(source, unpacked)
    read = _from_lmdb if (source / "data.mdb").is_file() else _from_folder
    paths = list(read(source, out / name))
    if not paths:
        raise ValueError(f"{source}: no images and no data.mdb in there")
    if source == unpacked:
        shutil.rmtree(unpacked)
    return sorted(f"{name}/{path}" for path in paths)


def _unzip_lmdb(archive: Path, folder: Path) -> Path:
    """Unpacks data.mdb, which LMDB needs as a file; `_images` removes it once its images are out."""
    if not zipfile.is_zipfile(archive):
        raise ValueError(f"{archive} is no zip archive (or only a part of one); download it again")
    with zipfile.ZipFile(archive) as z:
        members = [m for m in z.infolist() if os.path.basename(m.filename) == "data.mdb"]
        if len(members) != 1:
            raise ValueError(f"{archive}: expected one data.mdb, as in church_outdoor_train_lmdb.zip")
        target, size = folder / "data.mdb", members[0].file_size
        if not (target.is_file() and target.stat().st_size == size):
            with z.open(members[0]) as packed, atomic_write(target) as file:
                bar = {"total": size, "desc": "unpacking", "unit": "B", "unit_scale": True, "disable": None}
                with tqdm.wrapattr(packed, "read", **bar) as read:
                    shutil.copyfileobj(read, file, 1 << 22)
    return folder


def _from_lmdb(source: Path, folder: Path) -> Iterator[str]:
    """One file per entry, named by its key, in 256 folders."""
    import lmdb  # of the ldm extra, which no other data set needs

    try:
        database = lmdb.open(str(source), readonly=True, lock=False, readahead=False)
        with database as env, env.begin() as transaction:
            for key, data in tqdm(transaction.cursor(), folder.name, env.stat()["entries"], mininterval=bar_interval()):
                suffix = next((s for start, s in SIGNATURES.items() if data.startswith(start)), "")
                # A key becomes a path: one such as ../../x must not leave the folder.
                if not suffix or not re.fullmatch(rb"[0-9A-Za-z_-]+", key):
                    wrong = "a plain name" if suffix else "the key of an image"
                    raise ValueError(
                        f"{source}: {key!r} is not {wrong}; the archive is damaged or not LSUN's: download it again"
                    )
                path = f"{key[:2].decode()}/{key.decode()}{suffix}"
                target = folder / path
                if not (target.is_file() and target.stat().st_size == len(data)):
                    with atomic_write(target, sync=False) as file:
                        file.write(data)
                yield path
    except lmdb.Error as error:
        raise ValueError(f"{source}/data.mdb is damaged or no LMDB ({error}); download it again") from error


def _from_folder(source: Path, place: Path) -> Iterator[str]:
    """A folder of images is used where it is; PNG files, which may have 16 bits, are looked at."""
    if place.is_symlink() or not place.exists():
        place.unlink(missing_ok=True)
        place.symlink_to(source.resolve(), target_is_directory=True)
    elif place.resolve() != source.resolve():
        raise ValueError(f"{place} is there already; move it away, or give another FOLDER")
    for path in source.rglob("*"):
        if path.suffix.lower() in SUFFIXES:
            if path.suffix.lower() == ".png":
                open_image(path, path)
            yield path.relative_to(source).as_posix()


def run(args: argparse.Namespace) -> None:
    """Writes the images and lists into a folder, and links it where upstream looks."""
    train, val = prepare(args.source, args.folder, args.val, args.count)
    print(f"{args.folder}: {train:,} images to train on, {val:,} to validate with")
    place = args.upstream / "data" / "lsun"
    linked = link(args.folder, args.upstream)
    print(f"linked as {place}" if linked else f"not linked; upstream wants it as {place}")
