"""A folder of pictures of any kind, as every backbone reads it."""

import argparse
import contextlib
import hashlib
import json
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from ogdm_core.cli import bar_interval
from ogdm_core.files import atomic_write, write_json, write_text
from ogdm_core.images import SUFFIXES, ImageError, central_square, is_ours, open_image

from .pictures import write_images

GREY = ("1", "L", "LA")
VALIDATION = 300  # images that latent-diffusion picks checkpoints by
LDM = """\
# These images for latent-diffusion, after a config of upstream's: main.py --base CONFIG ldm.yaml
data:
  params:
    train:
      target: ldm.data.lsun.LSUNBase
      params: {{txt_file: {train}, data_root: {folder}, size: {size}}}
    validation:
      target: ldm.data.lsun.LSUNBase
      params: {{txt_file: {val}, data_root: {folder}, size: {size}, flip_p: 0.0}}
"""


def prepared(path: Path, size: int, grey: bool) -> Image.Image:
    """The picture upright, without transparency, its central square at size x size."""
    image = open_image(path, path)
    with contextlib.suppress(SyntaxError, ValueError, OSError):  # EXIF data that cannot be read
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = central_square(image.convert("L" if grey else "RGB"))
    return image.resize((size, size), Image.Resampling.LANCZOS)


def unfit(path: Path, size: int, enlarge: bool) -> tuple[str, bool]:
    """Why a picture is left out, empty if it is not, and whether it is grey."""
    try:
        image = open_image(path, path)
    except ImageError as error:
        return str(error).removeprefix(f"{path} ").partition("; ")[0], False
    if min(image.size) < size and not enlarge:
        return f"is {image.width}x{image.height}, smaller than {size}; --enlarge takes it", False
    return "", image.mode in GREY


def class_of(path: Path, source: Path) -> str:
    """The name of the top folder that a picture is in, without underscores, at which guided-diffusion cuts."""
    parts = path.relative_to(source).parts
    return parts[0].replace("_", "-") if len(parts) > 1 else ""


def classes_of(files: list[Path], source: Path) -> list[str]:
    """The class of each picture; all empty without several folders."""
    tops = {path.relative_to(source).parts[0] for path in files if path.parent != source}
    names = [class_of(path, source) for path in files]
    if len(tops) < 2:
        return [""] * len(files)
    if "" in names:
        raise ValueError(
            f"{source}: {names.count('')} pictures are beside the class folders, so their class is "
            "not known; move them into a folder, or give --no-classes"
        )
    if len(set(names)) < len(tops):
        raise ValueError(f"{source}: two folders differ by _ and - alone ({', '.join(sorted(tops))}); rename one")
    return names


def run(args: argparse.Namespace) -> None:
    """Writes the pictures, their labels, lists and a config for latent-diffusion, and an npz."""
    source, out, size = args.source, args.folder, args.size
    if not source.is_dir():
        raise ValueError(f"{source} is no folder; give the folder of your pictures")
    if out.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{out} is inside {source}, and would be read as pictures; give another folder")
    there = sorted(path for path in source.rglob("*") if is_ours(path, source))
    files = [path for path in there if path.suffix.lower() in SUFFIXES]
    if not files:
        raise ValueError(f"{source}: no pictures ({', '.join(SUFFIXES)}) in it")
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(partial(unfit, size=size, enlarge=args.enlarge), files)
        bar = {"desc": "looking", "total": len(files), "unit": " images", "mininterval": bar_interval()}
        looked = list(zip(files, tqdm(found, **bar), strict=True))
    others = [(path, "has no suffix of a picture") for path in there if path.suffix.lower() not in SUFFIXES]
    left_out = [(path, why) for path, (why, _) in looked if why] + others
    good, grey = [path for path, (why, _) in looked if not why], all(grey for _, (why, grey) in looked if not why)
    if not good:
        first = f"{left_out[0][0].relative_to(source)} {left_out[0][1]}"
        raise ValueError(f"{source}: none of the {len(files)} pictures can be taken, such as {first}")
    classes = [""] * len(good) if args.no_classes else classes_of(good, source)
    labels = sorted(set(classes))
    names = [f"{name}_{i:06d}.png".lstrip("_") for i, name in enumerate(classes)]
    order = hashlib.sha256(json.dumps([str(path.relative_to(source)) for path in good]).encode()).hexdigest()[:16]
    made = {"dataset": source.name, "size": size, "pictures": order, "grey": int(grey),
            "classes": len(labels)}  # fmt: skip
    pictures = zip(names, [partial(prepared, path, size, grey) for path in good], strict=True)
    write_images(out, pictures, len(names), made)
    report(left_out, out, source)
    numbers = [labels.index(name) for name in classes] if len(labels) > 1 else None
    write_json(out / "dataset.json", {"labels": numbers and [list(pair) for pair in zip(names, numbers, strict=True)]})
    lists(out, names, size)
    write_npz(out / "reference.npz", [out / name for name in names], numbers)
    if numbers:
        counts = Counter(classes)
        print(f"{len(labels)} classes: {', '.join(f'{name} {counts[name]}' for name in labels[:10])}")


def report(left_out: list[tuple[Path, str]], out: Path, source: Path) -> None:
    """Says what was left out and why, the first few on the screen, all in left-out.txt."""
    lines = [f"{path.relative_to(source)} {why}" for path, why in left_out]
    if lines:
        write_text(out / "left-out.txt", "".join(f"{line}\n" for line in lines))
        print(f"left out {len(lines)} files, see {out / 'left-out.txt'}:", *lines[:5], sep="\n  ")
    else:
        (out / "left-out.txt").unlink(missing_ok=True)


def lists(out: Path, names: list[str], size: int) -> None:
    """What latent-diffusion reads: lists of images to train on and to validate with, and their config."""
    few = min(VALIDATION, len(names))
    write_text(out / "train.txt", "".join(f"{name}\n" for name in names))
    write_text(out / "val.txt", "".join(f"{names[i * len(names) // few]}\n" for i in range(few)))
    files = {"folder": out, "train": out / "train.txt", "val": out / "val.txt"}
    paths = {name: json.dumps(str(file.resolve())) for name, file in files.items()}
    write_text(out / "ldm.yaml", LDM.format(size=size, **paths))


def write_npz(path: Path, files: list[Path], labels: list[int] | None) -> None:
    """arr_0 uint8 [N, H, W, C] and, with labels, arr_1 int64 [N], image by image."""
    with Image.open(files[0]) as first:
        shape = (*np.asarray(first).shape, 1)[:3]
    with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as member:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), *shape)}
            np.lib.format.write_array_header_1_0(member, header)
            for name in files:
                with Image.open(name) as image:
                    member.write(np.asarray(image).tobytes())
        if labels is not None:
            with archive.open("arr_1.npy", "w") as member:
                np.lib.format.write_array(member, np.array(labels, np.int64))
