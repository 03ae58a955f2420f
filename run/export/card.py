"""A model card: what the weights are, how they were made, their scores."""

import argparse
import json
from pathlib import Path
from typing import Any

from ogdm_core import trust
from ogdm_core.files import read_json
from run import backbones
from run.launch import newest
from run.provenance import commit

UNKNOWN = "not recorded"


def settings_of(checkpoint: Path, backbone: str) -> dict[str, Any] | None:
    """OGDM's settings from the newest state of D beside a checkpoint; None if there is none."""
    file = newest(checkpoint.parent, backbones.get(backbone).observed_checkpoint, whole=True)
    return trust.load(file, map_location="cpu", weights_only=True)["observer"]["config"] if file else None


def training_of(checkpoint: Path) -> dict[str, Any]:
    """Upstream EDM's own record of a run, training_options.json, without this machine's paths; {} without it."""
    file = checkpoint.with_name("training_options.json")
    local = ("run_dir", "resume_pkl", "resume_state_dump", "training_set_kwargs", "data_loader_kwargs")
    return {k: v for k, v in read_json(file).items() if k not in local} if file.is_file() else {}


def scores_table(files: list[Path]) -> str:
    """One row per file that run/evaluate.sh --json wrote, or per snapshot of a --curve."""
    rows = [
        "| samples | sampler | NFE | FID | precision | recall | features | images |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file in files:
        whole = read_json(file)
        sampling = whole.get("sampling") or {}
        for found in whole.get("points", [whole]):
            name = found.get("snapshot") or found.get("samples")
            if not name or "fid" not in found:
                raise ValueError(f"--scores {file}: there are no scores in it; run/evaluate.sh --json writes them")
            numbers = ["--" if found.get(n) is None else f"{found[n]:.4g}" for n in ("fid", "precision", "recall")]
            cells = [Path(name).name, sampling.get("sampler", "--"), sampling.get("nfe", "--"), *numbers]
            rows.append("| " + " | ".join(map(str, [*cells, found["features"], found["sample_images"]])) + " |")
    return "\n".join(rows) if files else f"{UNKNOWN}; `run/evaluate.sh REFERENCE SAMPLES --json FILE` makes them."


def card(args: argparse.Namespace, scores: str, why_not: str, sampling: str) -> str:
    """The text of README.md, for the flags of run/export.sh.

    scores     as `scores_table` makes them
    why_not    why there is no folder for diffusers, or empty
    sampling   how diffusers samples the folder
    """
    name, ogdm = args.folder.absolute().name, settings_of(args.checkpoint, args.backbone)
    usage = sampling.replace("DIR", name)
    if why_not:
        usage = f"`model.safetensors` has upstream's names. There is no folder for diffusers: {why_not}."
    what = "with observation guidance (OGDM)" if ogdm else "without a state of OGDM's discriminator beside it"
    settings = f"```json\n{json.dumps(ogdm, indent=1)}\n```" if ogdm else UNKNOWN
    return f"""\
---
library_name: {"ogdm" if why_not else "diffusers"}
tags:
- ogdm
- unconditional-image-generation
---

# {name}

The weights' average of a diffusion model, trained by {backbones.get(args.backbone).folder} {what}.

| | |
|---|---|
| checkpoint | {args.checkpoint.name} |
| data | {args.data or UNKNOWN} |
| command | {f"`{args.command}`" if args.command else UNKNOWN} |
| commit of OGDM, at export | {commit()} |

## Sample

{usage}

## Settings of OGDM

{settings}

The network's flags are in model.json.

## Scores

{scores}

FIDs of different features, references or numbers of images cannot be compared with each other.
"""
