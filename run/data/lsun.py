"""LSUN-Church in the layout that latent-diffusion reads:

    FOLDER/church_outdoor_train.txt     one path a line, relative to FOLDER/churches
    FOLDER/church_outdoor_val.txt
    FOLDER/churches/train/, val/        the images, byte for byte as the archives hold them

Sources are LSUN's own archives (LMDB, zipped or unpacked) or a folder of images. Validation images
are LSUN's 300 if their archive is given; without it 300 training images stand in, which is enough
for what upstream does with them: pick checkpoints.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN_COUNT = 126_227  # images in church_outdoor_train_lmdb
VAL_COUNT = 300  # in church_outdoor_val_lmdb
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SIGNATURES = {b"RIFF": ".webp", b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png"}


def prepare(
    source: Path, out: Path, val: Path | None = None, expect: int | None = TRAIN_COUNT
) -> tuple[int, int]:
    """Writes the layout above; returns the numbers of training and validation images.

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
    _write_list(out / "church_outdoor_train.txt", train_list)
    _write_list(out / "church_outdoor_val.txt", val_list)
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
    unpacked = None
    if source.is_file():
        source = unpacked = _unzip_lmdb(source, out / f".{name}_lmdb")
    if (source / "data.mdb").is_file():
        paths = list(_from_lmdb(source, out / name))
    else:
        paths = list(_from_folder(source, out / name))
    if unpacked is not None:
        shutil.rmtree(unpacked)
    if not paths:
        raise ValueError(f"{source}: no images and no data.mdb in there")
    return sorted(f"{name}/{path}" for path in paths)


def _unzip_lmdb(archive: Path, folder: Path) -> Path:
    """Unpacks data.mdb, which LMDB needs as a file; removed once its images are out."""
    if not zipfile.is_zipfile(archive):
        raise ValueError(f"{archive} is no zip archive (or only a part of one); download it again")
    with zipfile.ZipFile(archive) as z:
        members = [m for m in z.infolist() if os.path.basename(m.filename) == "data.mdb"]
        if len(members) != 1:
            raise ValueError(
                f"{archive}: expected one data.mdb, as in church_outdoor_train_lmdb.zip"
            )
        target = folder / "data.mdb"
        if target.is_file() and target.stat().st_size == members[0].file_size:
            return folder
        folder.mkdir(exist_ok=True)
        part = target.with_suffix(".part")
        with z.open(members[0]) as src, open(part, "wb") as dst:
            bar = _bar(total=members[0].file_size, unit="B", unit_scale=True, desc="unpacking")
            while chunk := src.read(1 << 22):
                dst.write(chunk)
                bar.update(len(chunk))
            bar.close()
        os.replace(part, target)
    return folder


def _from_lmdb(source: Path, folder: Path) -> Iterator[str]:
    """One file an entry, named by its key, in 256 folders."""
    import lmdb

    with lmdb.open(str(source), readonly=True, lock=False, readahead=False) as env:
        total = env.stat()["entries"]
        with env.begin() as transaction:
            for key, data in _bar(transaction.cursor(), total=total, desc=folder.name, unit="img"):
                path = f"{key[:2].decode()}/{key.decode()}{_suffix(key, data)}"
                _keep_or_write(folder / path, data)
                yield path


def _from_folder(source: Path, place: Path) -> Iterator[str]:
    """A folder of images is used where it is."""
    if place.is_symlink() or not place.exists():
        place.unlink(missing_ok=True)
        place.symlink_to(source.resolve(), target_is_directory=True)
    elif place.resolve() != source.resolve():
        raise ValueError(f"{place} is there already; move it away, or give another --out")
    for path in _bar(source.rglob("*"), desc=place.name, unit="file"):
        if path.suffix.lower() in SUFFIXES:
            yield path.relative_to(source).as_posix()


def _suffix(key: bytes, data: bytes) -> str:
    for signature, suffix in SIGNATURES.items():
        if data.startswith(signature):
            return suffix
    raise ValueError(f"entry {key!r} is no image; the archive is damaged: download it again")


def _keep_or_write(path: Path, data: bytes) -> None:
    """Whole files only: a killed run leaves a .part, which the next one overwrites."""
    if path.is_file() and path.stat().st_size == len(data):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def _write_list(path: Path, lines: list[str]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text("".join(f"{line}\n" for line in lines))
    os.replace(part, path)


def _bar(*args, **kwargs):
    from tqdm import tqdm

    return tqdm(*args, **kwargs, disable=None, mininterval=1.0)


def _count(text: str) -> int | None:
    return None if text == "any" else int(text)


def main(argv: list[str] | None = None) -> None:
    """Writes the images and lists into a folder, and links it where upstream looks."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.sh lsun",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="church_outdoor_train_lmdb.zip, the LMDB folder "
                        "from it, or a folder of images")  # fmt: skip
    parser.add_argument("folder", type=Path, help="where images and lists go")
    parser.add_argument("--val", type=Path, default=None, help="church_outdoor_val_lmdb.zip")
    parser.add_argument("--count", type=_count, default=TRAIN_COUNT, metavar="N|any",
                        help="training images there must be (default: %(default)s)")  # fmt: skip
    upstream = ROOT / "third_party" / "latent-diffusion"
    parser.add_argument("--upstream", type=Path, default=upstream,
                        help="gets a link to FOLDER as data/lsun (default: "
                             "third_party/latent-diffusion)")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        train, val = prepare(args.source, args.folder, args.val, args.count)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{args.folder}: {train:,} images to train on, {val:,} to validate with")
    place = args.upstream / "data" / "lsun"
    if link(args.folder, args.upstream):
        print(f"linked as {place}")
    else:
        print(f"not linked; upstream wants it as {place}")


if __name__ == "__main__":
    main()
