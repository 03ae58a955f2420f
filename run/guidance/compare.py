"""Guidance on diffusers models: guided samples, and the comparison on a quickstart's fine-tunes."""

from __future__ import annotations

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
from ogdm_core.trainer.images import Images, load
from run.draw import Model, draw_images
from run.evaluate import metrics
from run.evaluate.classifier import load_classifier
from run.guidance.train import load_samples, train_guide
from run.provenance import commit

KEY = ("run", "sampler", "nfe", "weight")


def sample(args: argparse.Namespace) -> None:
    """`run/guidance.sh sample`."""
    draw_images(
        args.model, args.output, args.count, args.sampler, args.nfe, args.seed,
        args.discretisation, args.guide, args.guide_weight,
    )  # fmt: skip


def make_guide(run: Path, images: Images, args: argparse.Namespace) -> Guide:
    """The guide of one model: read if it is there, else trained on samples that are drawn here."""
    path, samples = (args.output / f"{run.name}.{end}" for end in ("safetensors", "npz"))
    if not path.exists():
        if not samples.exists():
            draw_images(str(run), samples, args.count, "heun", 35, args.seed, args.discretisation)
        guide, loss = train_guide(
            images, load_samples(str(samples), images.channels), steps=args.steps, seed=args.seed,
            say=lambda line: print(f"{run.name}: {line}", flush=True),
        )  # fmt: skip
        save_guide(path, guide, held_out_loss=f"{loss:.4f}", commit=commit())
    return load_guide(path)


def fine_tunes(quickstart: Path, data: str) -> tuple[dict[Path, tuple[str, int]], Path]:
    """{folder: (method, seed)} of a quickstart's fine-tunes on `data`, and its classifier."""
    folder = quickstart / "runs"
    names = {p: re.fullmatch(r"(\w+)-seed(\d+).*", p.name) for p in sorted(folder.glob("*-seed*"))}
    runs = {p: (m[1], int(m[2])) for p, m in names.items() if m and _trained_on(p) == data}
    found = sorted(quickstart.glob(f"classifier-{data}-*.pt"))
    if not runs or not found:
        raise FileNotFoundError(
            f"{quickstart} holds no fine-tunes on {data}; "
            f"run/quickstart.sh --data {data} --out {quickstart}"
        )
    (method, seed), count = Counter(runs.values()).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{method}-seed{seed} stands for several fine-tunes in {folder}; remove the folders of "
            "those that are not meant, or give a quickstart's folder with one run per seed"
        )
    return runs, found[-1]


def _trained_on(run: Path) -> str | None:
    """The data of a finished training; None where there is none."""
    file = run / "training.json"
    if not file.is_file() or not (run / "unet").is_dir():
        return None
    return json.loads(file.read_text())["settings"]["data"]


def compare(args: argparse.Namespace) -> None:
    """Measures every fine-tune below `args.quickstart`/runs without a guide and with each weight.

    Writes output/results.json after every row, and prints a table at the end. Samples, guides and
    rows that are there already are not made again.
    """
    runs, features = fine_tunes(args.quickstart, "digits")
    images = load("digits")
    classifier, _ = load_classifier(features, images)
    real = classifier.features(images.all())
    shape = (args.samples, images.channels, images.size, images.size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = {
        "samples": args.samples, "discretisation": args.discretisation, "commit": commit(),
        "guide": {"samples": args.count, "steps": args.steps, "seed": args.seed}, "rows": [],
    }  # fmt: skip
    path = args.output / "results.json"
    if path.exists():
        result["rows"] = _rows_of(path, result)
    rows = result["rows"]
    have = [tuple(row[name] for name in KEY) for row in rows]
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
                         "recall": recall})  # fmt: skip
            write_json(path, result)
            print(f"{run.name}, {sampler} {nfe}, w = {weight:g}: FID {fid:.3f}, "
                  f"recall {recall:.3f}", flush=True)  # fmt: skip
    print(table(rows))


def _rows_of(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same settings."""
    earlier = json.loads(path.read_text())
    for name in ("samples", "discretisation", "guide"):
        if earlier[name] != settings[name]:
            raise ValueError(
                f"{path} was made with {name} = {earlier[name]}, this run has {settings[name]}; "
                "give another --output"
            )
    return earlier["rows"]


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
