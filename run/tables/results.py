"""What a run has found so far, as plain data: the paper's number and ours for every cell."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from .engine import Engine
from .experiments import Experiment, Options
from .paper import Table
from .stages import Stage, origin

DATASETS = {"cifar10": "CIFAR-10", "celeba64": "CelebA", "lsun-church": "LSUN Church"}
SMOKE_TITLE = (
    "SMOKE RUN: tiny networks, a few steps, a few digits. These numbers mean nothing but that the "
    "pipeline works"
)


def collect(
    table: Table, options: Options, experiments: list[Experiment], engine: Engine, command: str
) -> dict:
    """One entry a row; the table's files are written from it, and it is table<N>.json."""
    title = f"Table {table.number}. {table.caption}"
    return {
        "title": f"{SMOKE_TITLE} ({title})" if options.smoke else title,
        "number": table.number,
        "smoke": options.smoke,
        "samples": options.samples,
        "seed": options.seed,
        "command": command,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **origin(),
        "rows": [_row(experiment, engine) for experiment in experiments],
    }


def _row(experiment: Experiment, engine: Engine) -> dict:
    first = next(iter(experiment.cells.values()))
    failure = engine.failure(experiment.name)
    nfes = dict.fromkeys([*experiment.cells, *experiment.scores, *experiment.others])
    return {
        "row": experiment.name,
        "dataset": f"{DATASETS[first.dataset]} ({first.backbone.upper()}"
        f"{' cond.' if first.conditional else ''})",
        "method": first.method,
        "sampler": experiment.sampler,
        "preset": experiment.preset.name,
        "projection": first.projection,
        "k": first.k,
        "gamma": first.gamma,
        "checkpoint": experiment.checkpoint,
        "failed": _failed(*failure) if failure else None,
        "cells": [_cell(experiment, nfe, engine) for nfe in sorted(nfes, reverse=True)],
    }


def _failed(stage: Stage, outcome) -> dict:
    return {"stage": stage.name, "status": outcome.status, "reason": outcome.reason,
            "log": str(stage.log)}  # fmt: skip


def _cell(experiment: Experiment, nfe: int, engine: Engine) -> dict:
    reported = experiment.cells.get(nfe)
    cell = {
        "nfe": nfe,
        "paper_fid": reported.fid_text if reported else None,
        "paper_recall": reported.recall_text if reported else None,
        "fid": None,
        "recall": None,
    }
    if nfe not in experiment.scores:
        reason = "the sampler cannot spend exactly this many" if nfe in experiment.others else ""
        return cell | {"status": "not asked for", "reason": reason}
    stage, samples = experiment.scores[nfe], experiment.samples[nfe]
    status = engine.outcome(stage).status
    if status != "done":
        return cell | {"status": status}
    scores = json.loads(stage.output.read_text())
    kept = ("fid", "recall", "precision", "sfid", "reference_images", "sample_images")
    return cell | {
        "status": "done",
        **{name: scores.get(name) for name in kept},
        "images": str(samples.output),
        # Samples may have been deleted since.
        "commands": [c for s in (samples, stage) for c in (s.record() or {}).get("commands", [])],
    }
