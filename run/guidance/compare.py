"""Guidance measured on a quickstart's fine-tunes: run/guidance.sh compare."""

import argparse
import json
import re
import statistics
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ogdm_core.files import write_json
from ogdm_core.guidance import Guide, guided_nfe, load_guide, save_guide
from ogdm_core.images import Images, load
from run.evaluate import metrics
from run.evaluate.classifier import load_classifier
from run.guidance.train import load_samples, train_guide
from run.provenance import commit
from run.sampling import Model, draw_images


def make_guide(run: Path, images: Images, args: argparse.Namespace) -> Guide:
    """The guide of one model: read if it is there, else trained on samples that are drawn here."""
    path, samples = (args.output / f"{run.name}.{end}" for end in ("safetensors", "npz"))
    if not path.exists():
        if not samples.exists():
            draw_images(str(run), samples, args.count, "heun", 35, args.seed, args.discretisation)
        guide, loss = train_guide(
            images, load_samples(str(samples), images.channels), steps=args.steps, seed=args.seed,
            name=f"{run.name}: step",
        )  # fmt: skip
        save_guide(path, guide, held_out_loss=f"{loss:.4f}", commit=commit())
    return load_guide(path)


def fine_tunes(quickstart: Path, data: str) -> tuple[dict[Path, tuple[str, int]], Path]:
    """{folder: (method, seed)} of a quickstart's fine-tunes on `data`, and its classifier."""
    folder, runs, others = quickstart / "runs", {}, set()
    for run in sorted(folder.glob("*-seed*")):
        name, file = re.fullmatch(r"(\w+)-seed(\d+).*", run.name), run / "training.json"
        finished = name and file.is_file() and (run / "unet").is_dir()
        if finished and (of := json.loads(file.read_text())["settings"]["data"]) != data:
            others.add(of)
        elif finished:
            runs[run] = (name[1], int(name[2]))
    found = sorted(quickstart.glob(f"classifier-{data}-*.pt"))
    if not runs or not found:
        make = f"run/quickstart.sh --data {data} --out {quickstart}"
        advice = f"give --data {min(others)}" if others else make
        raise FileNotFoundError(f"{quickstart} holds no fine-tunes on {data}; {advice}")
    (method, seed), count = Counter(runs.values()).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{method}-seed{seed} stands for several fine-tunes in {folder}; remove the folders of "
            "those that are not meant, or give a quickstart's folder with one run per seed"
        )
    return runs, found[-1]


def compare(args: argparse.Namespace) -> None:
    """Measures every fine-tune below `args.quickstart`/runs without a guide and with each weight.

    Writes output/results.json after every row, and prints a table at the end. Samples, guides and
    rows that are there already are not made again.
    """
    runs, features = fine_tunes(args.quickstart, args.data)
    images = load(args.data)
    classifier, _ = load_classifier(features, images)
    real = classifier.features(images.all())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((args.samples, *images.shape), generator=generator)
    result = {
        "data": args.data, "samples": args.samples, "discretisation": args.discretisation,
        "guide": {"samples": args.count, "steps": args.steps, "seed": args.seed}, "rows": [],
    }  # fmt: skip
    path = args.output / "results.json"
    if path.exists():
        earlier = {"data": "digits"} | json.loads(path.read_text())  # older files do not say
        for name in ("data", "samples", "discretisation", "guide"):
            if earlier[name] != result[name]:
                raise ValueError(
                    f"{path} was made with {name} = {earlier[name]}, this run has {result[name]}; give another --output"
                )
        result["rows"] = earlier["rows"]
    rows = result["rows"]
    have = [(row["run"], row["sampler"], row["nfe"], row["weight"]) for row in rows]
    for run, (method, seed) in runs.items():
        guide = make_guide(run, images, args)
        model = Model(str(run), "cpu")
        for (sampler, nfe), weight in product(args.cells, dict.fromkeys((0.0, *args.weights))):
            if (run.name, sampler, nfe, weight) in have:
                continue
            x = model.draw(noise, sampler, nfe, discretisation=args.discretisation,
                           guide=guide if weight else None, weight=weight)  # fmt: skip
            fake = classifier.features(x)
            fid, (_, recall) = metrics.fid(real, fake), metrics.precision_recall(real, fake)
            cost = guided_nfe(sampler, nfe) if weight else nfe
            rows.append({"run": run.name, "method": method, "seed": seed, "sampler": sampler,
                         "nfe": nfe, "weight": weight, "cost": cost, "fid": fid,
                         "recall": recall, "commit": commit()})  # fmt: skip
            write_json(path, result)
            print(f"{run.name}, {sampler} {nfe}, w = {weight:g}: FID {fid:.3f}, "
                  f"recall {recall:.3f}", flush=True)  # fmt: skip
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per sampler, NFE, model and weight; mean ± standard deviation over seeds."""
    lines = ["| sampler | model | NFE in all | FID | recall |", "|---|---|---|---|---|"]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["sampler"], row["nfe"], row["method"], row["weight"], row["cost"])
        groups.setdefault(key, []).append(row)
    for (sampler, nfe, method, weight, cost), group in sorted(groups.items()):
        cells = []
        for name in ("fid", "recall"):
            values = [row[name] for row in group]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.3f} ± {spread:.3f}")
        model = f"{method} + guide, w = {weight:g}" if weight else method
        lines.append(f"| {sampler} {nfe} | {model} | {cost} | {' | '.join(cells)} |")
    return "\n".join(lines)
