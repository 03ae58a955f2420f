"""Samples a diffusers model with every sampler at every NFE, and measures FID and recall.

python -m run.quickstart.score MODEL --data digits --output rows.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from ogdm_core.files import write_json
from ogdm_core.samplers import sample
from ogdm_core.splice.diffusers import eps_fn_of, schedule_of
from ogdm_core.trainer import images as data_sets
from ogdm_core.trainer.train import load_model
from run.evaluate import metrics
from run.evaluate.classifier import load_classifier, train_classifier

GRID = {
    "euler": (5, 10, 15, 20, 25, 50),
    "s-pndm": (5, 10, 15, 20, 25),
    "f-pndm": (20, 25),
    "heun": (11, 15, 25),
}


def draw(unet, scheduler, noise: torch.Tensor, sampler: str, nfe: int, batch: int = 250):
    """Samples [N, C, H, W] in [-1, 1] from the same noise for everyone."""
    schedule = schedule_of(scheduler)
    classes = unet.config.num_class_embeds or 0
    label = torch.arange(len(noise)) % classes if classes else None
    parts = []
    for i in range(0, len(noise), batch):
        part = None if label is None else label[i : i + batch].to(noise.device)
        eps_fn = eps_fn_of(unet, schedule, scheduler.config.prediction_type, part)
        x_T = schedule.prior(noise[i : i + batch])
        parts.append(sample(eps_fn, x_T, schedule, sampler=sampler, nfe=nfe).clamp(-1, 1))
    return torch.cat(parts)


def main(argv: list[str] | None = None) -> int:
    """Writes {"rows": [...], "classifier_accuracy": ...} and the first few samples of each cell."""
    p = argparse.ArgumentParser(prog="python -m run.quickstart.score", description=__doc__)
    p.add_argument("model", help="folder in diffusers' format")
    p.add_argument("--data", default="digits", help="the reference images (default: digits)")
    p.add_argument("--size", type=int, help="image size, where the data can be resized")
    p.add_argument(
        "--output", required=True, type=Path, help="json to write; an npz goes beside it"
    )
    p.add_argument("--samples", type=int, default=2500, help="images per cell (default: 2500)")
    p.add_argument("--keep", type=int, default=16, help="images per cell to keep (default: 16)")
    p.add_argument("--classifier", type=Path, help="from save_classifier; absent: trained here")
    p.add_argument("--noise-seed", type=int, default=0, help="seed of x_T (default: 0)")
    args = p.parse_args(argv)

    try:
        images = data_sets.load(args.data, args.size)
        if args.classifier:
            classifier, accuracy = load_classifier(args.classifier, images)
        else:
            classifier, accuracy = train_classifier(images)
        unet, scheduler = load_model(args.model)
    except (ValueError, FileNotFoundError, ImportError) as error:
        p.error(str(error))
    real = classifier.features(images.all())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unet.to(device).eval()
    generator = torch.Generator().manual_seed(args.noise_seed)
    shape = (args.samples, images.channels, images.size, images.size)
    noise = torch.randn(shape, generator=generator).to(device)
    rows, kept = [], {}
    total, done = sum(map(sum, GRID.values())), 0
    for sampler, nfes in GRID.items():
        for nfe in nfes:
            x = draw(unet, scheduler, noise, sampler, nfe).cpu()
            fake = classifier.features(x)
            precision, recall = metrics.precision_recall(real, fake)
            rows.append({
                "sampler": sampler, "nfe": nfe, "fid": metrics.fid(real, fake), "recall": recall,
                "precision": precision, "samples": args.samples,
            })  # fmt: skip
            kept[f"{sampler}-{nfe}"] = x[: args.keep].numpy()
            done += nfe
            print(
                f"step {done}/{total}  {sampler} NFE {nfe}: FID {rows[-1]['fid']:.2f}", flush=True
            )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output.with_suffix(".npz"), **kept)
    write_json(args.output, {"rows": rows, "classifier_accuracy": accuracy})
    return 0


if __name__ == "__main__":
    sys.exit(main())
