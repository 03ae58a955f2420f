"""Samples a diffusers model with every sampler at every NFE, and measures FID and recall.

    python -m run.quickstart.score MODEL --data mnist --output rows.json

Writes rows.json, some samples of each cell to rows.npz, and to rows.jsonl a line per cell that is done.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ogdm_core import images as data_sets
from ogdm_core.cli import Parser, bar_interval, cells, errors_in_one_line, number
from ogdm_core.diffusers.model import check_model
from ogdm_core.files import atomic_write, check_writable, sha256, write_json
from ogdm_core.nfe import DISCRETISATIONS
from ogdm_core.samplers import sample
from run.evaluate import classifier, metrics
from run.evaluate.features import load_features
from run.sampling import BATCH, Model

GRID = {
    "euler": (3, 5, 10, 25), "s-pndm": (5, 10), "f-pndm": (15, 25), "heun": (11,), "dpmpp-2m": (5, 10),
    "unipc": (5, 10),
}  # fmt: skip
STEPS = 10  # of the trajectories that are kept


def time_grids(text: str) -> dict[str, str]:
    """The type of a flag with one time grid, or with several, by cell: {cell, or "": grid}."""
    found = {cell: grid for cell, _, grid in (part.rpartition("=") for part in text.split(","))}
    if any(found):
        cells(",".join(filter(None, found)))
    if wrong := set(found.values()) - set(DISCRETISATIONS):
        known = ", ".join(DISCRETISATIONS)
        raise argparse.ArgumentTypeError(f"{sorted(wrong)[0]!r} is no time grid; use one of {known}")
    return found


def denoised(model: Model, noise: Tensor, discretisation: str) -> Tensor:
    """The estimates of x_0 that Euler's STEPS steps make on their way [N, STEPS, C, H, W]."""
    estimates: list[Tensor] = []
    sample(model.eps_fn(model.labels(len(noise))), model.schedule.prior(noise.to(model.device)), model.schedule,
           sampler="euler", nfe=STEPS, discretisation=discretisation,
           callback=lambda x_0: estimates.append(x_0.clamp(-1, 1)))  # fmt: skip
    return torch.stack(estimates, 1).cpu()


def classifier_path(out: Path, data: str) -> Path:
    """Where the classifier of this data set is, or will be; other code has another file."""
    name = re.sub(r"[^a-z0-9]+", "_", data.lower())
    return out / f"classifier-{name}-{sha256(classifier.__file__)[:8]}.pt"


def ensure_classifier(out: Path, data: str) -> Path:
    """The classifier whose features FID and recall are measured in."""
    path = classifier_path(out, data)
    try:
        classifier.load_classifier(path)
    except ValueError:  # absent or damaged
        print("training a classifier whose features FID is measured in", flush=True)
        images = data_sets.load(data)
        classifier.save_classifier(path, *classifier.train_classifier(images))
    return path


def net_of(args: argparse.Namespace, images: data_sets.Images) -> tuple[Callable[[Tensor], Tensor], float | None]:
    """(features [N, D] of images [N, C, H, W] in [-1, 1], the accuracy of a classifier)."""
    if args.features or args.weights:
        net = load_features(args.features, args.weights)
        return lambda x: torch.cat([net(data_sets.to_uint8(part)) for part in x.split(64)]), None
    if args.classifier:
        trained, accuracy = classifier.load_classifier(args.classifier, images)
    else:
        print("training a classifier whose features FID is measured in", flush=True)
        trained, accuracy = classifier.train_classifier(images)
    return trained.features, accuracy


def main(argv: list[str] | None = None) -> int:
    """Writes {"rows": [...], ...} as json, and the first few samples of each cell as npz."""
    p = Parser(prog="python -m run.quickstart.score", description=__doc__)
    add = p.add_argument
    add("model", help="folder in diffusers' format")
    add("--data", default="digits", help="the reference images (default: digits)")
    add("--size", type=number(int, 1), help="image size, where the data can be resized")
    add("--output", required=True, type=Path, help="json to write; an npz goes beside it")
    add("--samples", type=number(int, 4), default=2500, help="images per cell (default: 2500)")
    add("--cells", type=cells, metavar="SAMPLER-NFE,...", help="as in euler-5,s-pndm-10",
        default=[(sampler, nfe) for sampler, nfes in GRID.items() for nfe in nfes])  # fmt: skip
    add("--discretisation", "--discretization", type=time_grids, default={}, metavar="GRID|SAMPLER-NFE=GRID,...",
        help=f"time grid of all cells, or of some: {', '.join(DISCRETISATIONS)} (default: the "
        "model's own)")  # fmt: skip
    add("--keep", type=number(int, 0), default=24, help="images per cell to keep (default: 24)")
    add("--classifier", type=Path, help="from save_classifier; absent: trained here")
    add("--features", metavar="NET", help="a feature net in its place, one of those that run/evaluate.sh takes")
    add("--weights", type=Path, metavar="FILE", help="Inception's weights, likewise")
    add("--jobs", type=number(int, 1), default=1, help="cells side by side (default: 1)")
    add("--noise-seed", type=number(int, 0, 2**63), default=0, help="seed of x_T (default: 0)")
    args = p.parse_args(argv)
    with errors_in_one_line():
        check_model(args.model)
        check_writable(args.output)
        images = data_sets.load(args.data, args.size)
        features, accuracy = net_of(args, images)
        model, real_images = Model(args.model), images.all()
        most, steps = max(nfe for _, nfe in args.cells), model.schedule.T
        if most > steps:
            raise ValueError(f"{args.model} has {steps} time steps; the grid of NFEs needs {most}")
    real = features(real_images)
    half = real[torch.randperm(len(real), generator=torch.Generator().manual_seed(0))]
    half_fid = metrics.fid(*half.tensor_split(2))
    generator = torch.Generator().manual_seed(args.noise_seed)
    noise = torch.randn((args.samples, *images.shape), generator=generator)
    batch = max(BATCH, 2**16 // noise[0, 0].numel())  # small images are faster in large batches
    everywhere = args.discretisation.get("", model.schedule.spacing)

    def times(sampler: str, nfe: int) -> str:
        return args.discretisation.get(f"{sampler}-{nfe}", everywhere)

    def score(cell: tuple[str, int]) -> tuple[dict[str, Any], Tensor]:
        sampler, nfe = cell
        x = model.draw(noise, sampler, nfe, discretisation=times(sampler, nfe), batch=batch)
        fake = features(x)
        fid, (precision, recall) = metrics.fid(real, fake), metrics.precision_recall(real, fake)
        return {"sampler": sampler, "times": times(sampler, nfe), "nfe": nfe, "fid": fid,
                "recall": recall, "precision": precision,
                "samples": args.samples}, x[: args.keep]  # fmt: skip

    rows, kept, done = [], {}, 0
    with ThreadPoolExecutor(args.jobs) as pool, args.output.with_suffix(".jsonl").open("w", buffering=1) as log:
        for row, x in tqdm(pool.map(score, args.cells), total=len(args.cells), unit="cell", mininterval=bar_interval()):
            rows.append(row)
            kept[f"{row['sampler']}-{row['nfe']}"] = x.numpy()
            done += row["nfe"]
            entry = {"step": done} | {name: row[name] for name in ("sampler", "nfe", "fid")}
            log.write(json.dumps(entry) + "\n")
            tqdm.write(f"{row['sampler']}, NFE {row['nfe']}: FID {row['fid']:.2f}", file=sys.stderr)
    if args.keep:
        kept["trajectory"] = denoised(model, noise[: args.keep], times("euler", STEPS)).numpy()
    found = {"rows": rows, "classifier_accuracy": accuracy, "half_fid": half_fid}
    with atomic_write(args.output.with_suffix(".npz")) as file:
        np.savez_compressed(file, **kept)
    write_json(args.output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
