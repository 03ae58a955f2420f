"""FID of every snapshot of a run, as a curve; scores are kept, so that a run that goes on costs its new ones only."""

import argparse
import hashlib
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ogdm_core.files import read_json, sha256, write_json
from run.sampling import backbone_of, draw_images

from .flags import OF_MODEL
from .sources import Source, open_source


def snapshots(pattern: Path) -> list[tuple[int, Path]]:
    """The files or folders that match, by the number that their name ends with."""
    root = Path(pattern.anchor or ".")
    found = []
    for path in root.glob(str(pattern.relative_to(pattern.anchor))):
        numbers = re.findall(r"\d+", path.name)
        if not numbers:
            raise ValueError(f"{path} has no number in its name; give a pattern of snapshots, such as 'RUN/*snapshot*'")
        backbone_of(path)  # refuses what cannot be sampled
        found.append((int(numbers[-1]), path))
    if not found:
        raise ValueError(f"nothing matches {pattern}; quote it, and give snapshots such as 'RUN/*snapshot*'")
    return sorted(found)


def scores(
    reference: Source, args: argparse.Namespace, evaluate: Callable[[Source, Source], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The numbers of each snapshot; those that the cache has are read from there."""
    points, real = [], reference.digest()
    for number, path in snapshots(args.samples):
        names = (*OF_MODEL, "seed", "evaluator", "features", "pr_images", "floor")
        told = {name: getattr(args, name) for name in names}
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        weights = [sha256(file) for file in files]
        net = sha256(args.weights) if args.weights else ""
        key = hashlib.sha256(json.dumps([real, weights, net, told]).encode()).hexdigest()[:32]
        file = args.cache / f"score-{key}.json"
        if args.no_cache or not file.is_file():
            with tempfile.TemporaryDirectory() as folder:
                npz = path if path.suffix == ".npz" else Path(folder, "samples.npz")
                if npz != path:
                    solver = {n: getattr(args, n) for n in OF_MODEL if n not in ("count", "sampler", "nfe")}
                    draw_images(str(path), npz, args.count, args.sampler, args.nfe, args.seed, **solver)
                found = evaluate(reference, open_source(npz))
            if not args.no_cache:
                write_json(file, found)
        else:
            found = read_json(file)
        points.append({"number": number, "snapshot": str(path)} | found)
        print(f"{path}  FID {found['fid']:.4f}", flush=True)
    return points


def plot(points: list[dict[str, Any]], file: Path, title: str, command: str) -> None:
    """FID over the snapshots' numbers."""
    from run.figures.style import figure, save

    fig, ax = figure(1, 1, size=(5.0, 3.2), layout="constrained")
    ax.plot([p["number"] for p in points], [p["fid"] for p in points], "o-")
    ax.set(title=title, xlabel="number in the snapshot's name", ylabel="FID")
    save(fig, file, command)
