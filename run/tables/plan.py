"""What a run would cost: images, samples, network evaluations, disk, and hours on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from run.train.presets import PRESETS, Preset

from . import check
from .engine import Engine
from .experiments import Experiment, Options
from .progress import duration
from .recipes import RECIPES
from .sources import environment
from .stages import Stage

REPEATS = 2
GPU_BATCH = 16  # images a step where a GPU is measured; on a CPU one


@dataclass
class Work:
    """What is left to do of one row; a training that rows share is the first one's."""

    row: str
    preset: Preset
    trainings: list[Stage]  # of this row that no row above has
    cells: list[int]  # NFEs that are not sampled yet

    def trained(self) -> list[Preset]:
        """The presets that these trainings train."""
        return [PRESETS[stage.name.removesuffix("/train")] for stage in self.trainings]


def work_left(experiments: list[Experiment]) -> list[Work]:
    """One entry a row, without what is done."""
    engine = _engine(experiments)
    seen: set[str] = set()
    left = []
    for e in experiments:
        pending = {stage.key: stage for stage in engine.pending(e.name)}
        trainings = [s for s in pending.values() if s.kind == "train" and s.key not in seen]
        seen |= {stage.key for stage in trainings}
        cells = [nfe for nfe, stage in e.samples.items() if stage.key in pending]
        left.append(Work(e.name, e.preset, trainings, cells))
    return left


def _engine(experiments: list[Experiment]) -> Engine:
    """Runs nothing, but knows what is done."""
    engine = Engine({e.name: e.stages for e in experiments}, Path())
    engine.look()
    return engine


def measurements(options: Options, left: list[Work], console: Console) -> dict[tuple, dict | str]:
    """By network (data set, backbone, with or without classes): what a step takes, or why not."""
    wanted: dict[tuple, set[str]] = {}
    for work in left:
        for preset in [work.preset, *work.trained()]:
            wanted.setdefault(_network(preset), set())
        for preset in work.trained():
            wanted[_network(preset)].add(preset.projection or "none")
    found: dict[tuple, dict | str] = {}
    for network, projections in wanted.items():
        preset = next(p for w in left for p in [w.preset, *w.trained()] if _network(p) == network)
        with console.status(f"measuring a few steps of {preset.name}'s network"):
            found[network] = _measure(options, preset, projections)
    return found


def _network(preset: Preset) -> tuple[str, str, bool]:
    return preset.dataset, preset.backbone, preset.conditional


def _measure(options: Options, preset: Preset, projections: set[str]) -> dict | str:
    recipe = RECIPES[preset.backbone]
    if not (options.third_party / recipe.upstream / recipe.script).is_file():
        return f"not measured: run/setup.sh {recipe.upstream} first"
    argv = [sys.executable, "-m", "run.tables.measure", preset.name]
    argv += ["--third-party", str(options.third_party), "--repeats", str(REPEATS)]
    argv += ["--projections", ",".join(sorted(projections))]
    argv += ["--batch", str(GPU_BATCH if _cuda() else 1)]
    env = os.environ | dict(environment())
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"not measured: {lines[-1] if lines else f'exit status {done.returncode}'}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def seconds(options: Options, work: Work, measured: dict) -> tuple[float, float] | None:
    """(training, sampling) seconds of a row with --gpus processes; None if not measured.

    Upstream's sampling of latents runs in one process.
    """
    training = 0.0
    for preset in work.trained():
        step = measured[_network(preset)]
        if isinstance(step, str):
            return None
        image = step["train"][preset.projection or "none"] + step["encode"]
        training += preset.images * image / _processes(options, step)
    step = measured[_network(work.preset)]
    if isinstance(step, str):
        return None
    ranks = 1 if work.preset.backbone == "ldm" else _processes(options, step)
    images = options.samples * sum(nfe * step["evaluate"] + step["decode"] for nfe in work.cells)
    return training, images / ranks


def _processes(options: Options, step: dict) -> int:
    """How many processes really run side by side: on a CPU no more than there are cores for."""
    if step["device"] != "cpu":
        return options.gpus
    return min(options.gpus, max(1, (os.cpu_count() or 1) // step["threads"]))


def print_plan(options: Options, experiments: list[Experiment], console: Console) -> None:
    """A table of what is left to do, and how the hours were found."""
    if options.smoke:
        engine = _engine(experiments)
        left, total = len(engine.open()), len(engine.stages)
        console.print(f"smoke run: {left} of {total} commands left, some seconds each, "
                      f"{options.jobs} at a time; {check.SMOKE_GB:.0f} GB at most")  # fmt: skip
        return
    left = work_left(experiments)
    measured = measurements(options, left, console)
    table = Table(title=f"Left to do for Table {options.number}, {options.gpus} process(es)")
    names = ("row", "trains on", "samples", "evaluations", "training", "sampling")
    for name in names:
        table.add_column(name, justify="left" if name == "row" else "right")
    totals = [0.0, 0.0]
    for work in left:
        trained = work.trained()
        images = sum(preset.images for preset in trained)
        times = seconds(options, work, measured)
        if times:
            totals = [a + b for a, b in zip(totals, times, strict=True)]
        extra = [p.name for p in trained if p.name != work.preset.name]
        note = f"\n[dim]with {', '.join(extra)}[/]" if extra else ""
        table.add_row(
            work.row + note, f"{images / 1e6:g}M images" if images else "–",
            f"{len(work.cells)} x {options.samples:,}",
            f"{options.samples * sum(work.cells) / 1e6:g}M",
            *([duration(t) for t in times] if times else ["?", "?"]),
        )  # fmt: skip
    console.print(table)
    names = [work.row for work in left]
    disk = check.disk_gb(options, check.needed(options, names), names)
    parts = ", ".join(f"{name} {size:.0f}" for name, size in disk.items())
    console.print(
        f"disk: {sum(disk.values()):.0f} GB in all, done or not ({parts})", soft_wrap=True
    )
    if not any(isinstance(m, str) for m in measured.values()):
        training, sampling = map(duration, totals)
        text = f"time: {training} of training, {sampling} of sampling; without evaluation and data"
        console.print(text, soft_wrap=True)
    for network, m in measured.items():
        console.print(f"{'-'.join(map(str, network[:2]))}{' cond.' if network[2] else ''}: "
                      f"{_told(m)}", highlight=False, soft_wrap=True)  # fmt: skip


def _told(m: dict | str) -> str:
    if isinstance(m, str):
        return m
    steps = ", ".join(f"{name} {value:.3g} s" for name, value in m["train"].items())
    clock = " (processor time)" if m["device"] == "cpu" else ""
    coder = f"; autoencoder {m['encode']:.3g} s in, {m['decode']:.3g} s out" if m["encode"] else ""
    return (
        f"measured on {m['device']}{clock}, {m['threads']} thread(s), the row's own network "
        f"({m['parameters'] / 1e6:.1f}M parameters), {m['repeats']} steps of batch {m['batch']}, "
        f"scaled by the number of images: an image's evaluation {m['evaluate']:.3g} s; "
        f"its training step {steps or 'not needed'}{coder}"
    )
