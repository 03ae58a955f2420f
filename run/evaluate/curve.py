"""FID of every snapshot of a run, as a curve; scores are kept, so that a run that goes on costs its new ones only."""

import argparse
import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from ogdm_core.files import read_json, sha256, write_json
from run.sampling import backbone_of, draw_images

from .flags import OF_MODEL
from .sources import Source, open_source, planned


def drawn(model: Path, file: Path, reference: Source, evaluator: Any, args: argparse.Namespace) -> Source:
    """Samples of a model, which are written to `file`; whether they can be evaluated is known before."""
    solver = {name: getattr(args, name) for name in OF_MODEL}
    draw_images(
        str(model), file, seed=args.seed,
        check=lambda shape: evaluator.check(reference, planned(model, args.count, shape), args), **solver,
    )  # fmt: skip
    return open_source(file)


def snapshots(pattern: Path) -> list[tuple[int, Path]]:
    """The files or folders that match, by the last whole number in their name; LDM's last.ckpt has none, and a
    checkpoint that another one took the place of is left out."""
    root = Path(pattern.anchor or ".")
    found = []
    for path in root.glob(str(pattern.relative_to(pattern.anchor))):
        if path.match("last*.ckpt") or path.match("*.previous.*"):
            continue
        name = re.sub(r"-v\d+$", "", path.stem)  # -v1: Lightning found the name taken
        numbers = re.findall(r"(?<!\d)(?<!\d\.)\d+(?!\d|\.\d)", name)  # no decimals, such as an average's
        if not numbers:
            raise ValueError(f"{path} has no number in its name; give a pattern of snapshots, such as 'RUN/*snapshot*'")
        backbone_of(path)  # refuses what cannot be sampled
        found.append((int(numbers[-1]), path))
    if not found:
        raise ValueError(f"nothing matches {pattern}; quote it, and give snapshots such as 'RUN/*snapshot*'")
    return sorted(found)


def scores(reference: Source, evaluator: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The numbers of each snapshot; those that the cache has are read from there."""
    points, real, net = [], reference.digest(), evaluator.key(args)
    for number, path in snapshots(args.samples):
        names = (*OF_MODEL, "seed", "evaluator", "features", "pr_images", "floor")
        told = {name: getattr(args, name) for name in names}
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        weights = [sha256(file) for file in files]
        key = hashlib.sha256(json.dumps([real, weights, net, told]).encode()).hexdigest()[:32]
        file = args.cache / f"score-{key}.json"
        if args.no_cache or not file.is_file():
            with tempfile.TemporaryDirectory() as folder:
                if path.suffix == ".npz":
                    samples = open_source(path)
                    evaluator.check(reference, samples, args)
                else:
                    samples = drawn(path, Path(folder, "samples.npz"), reference, evaluator, args)
                found = evaluator.evaluate(reference, samples, args)
            if not args.no_cache:
                write_json(file, found)
        else:
            found = read_json(file)
        points.append({"number": number, "snapshot": str(path)} | found)
        print(f"{path}  FID {found['fid']:.4f}", flush=True)
    return points


def plot(points: list[dict[str, Any]], args: argparse.Namespace, command: str) -> None:
    """FID, in the features of the first net, over the snapshots' numbers."""
    from run.figures.style import figure, save

    fig, ax = figure(1, 1, size=(5.0, 3.2), layout="constrained")
    ax.plot([p["number"] for p in points], [p["fid"] for p in points], "o-")
    title = f"{args.sampler}, {args.nfe} evaluations, {args.count:,} samples"
    net = (args.features or "Inception").split(",")[0]
    ax.set(title=title, xlabel="number in the snapshot's name", ylabel=f"FID, {net}")
    ax.locator_params("x", integer=True)
    fig.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))  # room for the command below
    save(fig, args.curve, command)
