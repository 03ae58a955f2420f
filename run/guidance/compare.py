"""Guidance on diffusers models: guided samples, and the comparison on a quickstart's fine-tunes."""

from __future__ import annotations

import json
import re
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ogdm_core.files import write_json
from ogdm_core.guidance import Guide, guided_nfe, load_guide, save_guide
from ogdm_core.random import generator_of
from ogdm_core.splice.sampling import write_npz
from ogdm_core.trainer.images import load
from ogdm_core.trainer.train import load_model
from run.evaluate import metrics
from run.evaluate.classifier import load_classifier
from run.guidance.train import load_samples, train_guide
from run.provenance import commit
from run.quickstart.score import draw

Cell = tuple[str, int]  # sampler, NFE
KEY = ("run", "sampler", "nfe", "weight")


def draw_images(
    model: str, path: Path, count: int, sampler: str, nfe: int, seed: int = 0,
    discretisation: str | None = None, guide: Path | None = None, weight: float = 1.0,
) -> None:  # fmt: skip
    """Writes samples of a model in diffusers' format as an evaluator reads them."""
    unet, scheduler = load_model(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unet.to(device).eval()
    loaded = load_guide(guide, device) if guide else None
    config = unet.config
    shape = (count, config.in_channels, config.sample_size, config.sample_size)
    noise = torch.randn(shape, generator=generator_of(seed, "samples")).to(device)
    x = draw(unet, scheduler, noise, sampler, nfe, discretisation=discretisation,
             guide=loaded, weight=weight)  # fmt: skip
    pixels = ((x + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    classes = config.num_class_embeds or 0
    write_npz(str(path), pixels, np.arange(count) % classes if classes else None)
    cost = guided_nfe(sampler, nfe) if guide else nfe
    print(f"wrote {path}: {count} images, {sampler}, NFE {cost}", flush=True)


def make_guide(model: Path, folder: Path, name: str, data: str, discretisation: str,
               count: int, steps: int, seed: int) -> Guide:  # fmt: skip
    """The guide of one model: read if it is there, else trained on samples that are drawn here."""
    path, samples = folder / f"{name}.safetensors", folder / f"{name}.npz"
    if not path.exists():
        if not samples.exists():
            draw_images(str(model), samples, count, "heun", 35, seed, discretisation)
        images = load(data)
        guide, loss = train_guide(
            images, load_samples(str(samples), images.channels), steps=steps, seed=seed,
            say=lambda line: print(f"{name}: {line}", flush=True),
        )  # fmt: skip
        save_guide(path, guide, held_out_loss=f"{loss:.4f}", commit=commit())
    return load_guide(path)


def compare(
    quickstart: Path, output: Path, cells: list[Cell], weights: list[float], discretisation: str,
    samples: int, count: int, steps: int, seed: int,
) -> None:  # fmt: skip
    """Measures every fine-tune below `quickstart`/runs without a guide and with each weight.

    Writes output/results.json after every row, and prints a table at the end. Samples, guides and
    rows that are there already are not made again.
    """
    runs = sorted(p for p in (quickstart / "runs").glob("*-seed*") if (p / "unet").is_dir())
    found = sorted(quickstart.glob("classifier-digits-*.pt"))
    if not runs or not found:
        raise FileNotFoundError(
            f"{quickstart} holds no fine-tunes on digits; run/quickstart.sh --out {quickstart}"
        )
    images = load("digits")
    classifier, _ = load_classifier(found[-1], images)
    real = classifier.features(images.all())
    shape = (samples, images.channels, images.size, images.size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = {
        "samples": samples, "discretisation": discretisation, "commit": commit(),
        "guide": {"samples": count, "steps": steps, "seed": seed}, "rows": [],
    }  # fmt: skip
    path = output / "results.json"
    if path.exists():
        result["rows"] = _rows_of(path, result)
    rows = result["rows"]
    have = [tuple(row[name] for name in KEY) for row in rows]
    seen = [re.fullmatch(r"(\w+-seed\d+).*", run.name).group(1) for run in runs]
    if twice := sorted({name for name in seen if seen.count(name) > 1}):
        raise ValueError(
            f"{twice[0]} stands for several fine-tunes in {runs[0].parent}; remove the folders of "
            "those that are not meant, or give a quickstart's folder with one run per seed"
        )
    for run in runs:
        method, number = re.fullmatch(r"(\w+)-seed(\d+).*", run.name).groups()
        name = run.name
        guide = make_guide(run, output, name, "digits", discretisation, count, steps, seed)
        unet, scheduler = load_model(str(run))
        unet.eval()
        for (sampler, nfe), weight in product(cells, dict.fromkeys((0.0, *weights))):
            if (name, sampler, nfe, weight) in have:
                continue
            x = draw(unet, scheduler, noise, sampler, nfe, discretisation=discretisation,
                     guide=guide if weight else None, weight=weight)  # fmt: skip
            fake = classifier.features(x)
            fid, (_, recall) = metrics.fid(real, fake), metrics.precision_recall(real, fake)
            cost = guided_nfe(sampler, nfe) if weight else nfe
            rows.append({"run": name, "method": method, "seed": int(number), "sampler": sampler,
                         "nfe": nfe, "weight": weight, "cost": cost, "fid": fid,
                         "recall": recall})  # fmt: skip
            write_json(path, result)
            print(f"{name}, {sampler} {nfe}, w = {weight:g}: FID {fid:.3f}, recall {recall:.3f}",
                  flush=True)  # fmt: skip
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
