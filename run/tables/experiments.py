"""From a table of the paper to stages: for each row data, training, sampling and evaluation."""

from __future__ import annotations

import difflib
import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ogdm_core.samplers import steps_for_nfe
from run.provenance import ROOT
from run.train.presets import PRESETS, Preset

from . import paper
from .recipes import RECIPES, Recipe
from .sources import data_stages, environment
from .stages import Command, Stage, chain

SMOKE_IMAGES, PAPER_IMAGES = 16, 50_000
SMOKE_FEATURES = "run.tables.smoke:features"


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    number: int
    rows: tuple[str, ...] = ()  # names or globs; all if empty
    nfes: tuple[int, ...] = ()  # all of the table's if empty
    gpus: int = 1
    images: int = 0  # samples a cell; 0: the paper's 50,000, or a few in a smoke run
    checkpoints: tuple[tuple[str, str], ...] = ()  # (row or preset, path)
    smoke: bool = False
    out: Path = Path("out/tables")
    data: Path = Path("data")
    third_party: Path = ROOT / "third_party"
    weights: str = ""  # Inception's
    features: str = ""  # module:attribute, in place of Inception
    evaluator: str = "torch"
    seed: int = 0
    jobs: int = 1
    threads: int = 0

    @property
    def samples(self) -> int:
        return self.images or (SMOKE_IMAGES if self.smoke else PAPER_IMAGES)

    @property
    def work(self) -> Path:
        return self.out / "stages"


@dataclass(frozen=True)
class Experiment:
    """One row of a table: its training, and for each NFE the sampling and the evaluation."""

    name: str
    preset: Preset
    sampler: str
    cells: dict[int, paper.Row]
    train: Stage | None  # None: a checkpoint was given
    checkpoint: str  # path of the weights that are sampled, there or to come
    samples: dict[int, Stage]
    scores: dict[int, Stage]
    others: list[int] = field(default_factory=list)  # NFEs that the sampler cannot hit

    @property
    def stages(self) -> list[Stage]:
        """All of them, needs first, one NFE after the other."""
        return chain([*([self.train] if self.train else []), *self.scores.values()])


def select_rows(table: paper.Table, patterns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(names of rows in the table's order, what is wrong with the patterns)."""
    chosen, problems = set(), []
    for pattern in patterns or ("*",):
        found = fnmatch.filter(table.names, pattern)
        chosen |= set(found)
        if not found:
            near = difflib.get_close_matches(pattern, table.names, 4, 0.5) or table.names
            problems.append(
                f"--rows: Table {table.number} has no row {pattern!r}; near are {', '.join(near)}"
            )
    return [name for name in table.names if name in chosen], problems


def presets_of(table: paper.Table) -> dict[str, str]:
    """Names that --checkpoint takes: rows, and the rows of Table 5 that they rest on."""
    names = {}
    for row in table.rows:
        names[row.row] = names[row.preset] = row.preset
        if base := baseline_of(PRESETS[row.preset]):
            names[base.name] = base.name
    return names


def baseline_of(preset: Preset) -> Preset | None:
    """The preset whose weights a fine-tune starts from."""
    if preset.training != "finetune":
        return None
    same = (preset.dataset, preset.backbone, preset.conditional)
    return next(
        p for p in PRESETS.values()
        if p.training == "baseline" and (p.dataset, p.backbone, p.conditional) == same
    )  # fmt: skip


class Builder:
    """Makes the stages of rows; stages that rows share are made once."""

    def __init__(self, options: Options):
        self.options = options
        self.table = paper.table(options.number)
        known = presets_of(self.table)
        self.given = {known[name]: path for name, path in options.checkpoints if name in known}
        self._trained: dict[str, Stage] = {}

    def recipe(self, backbone: str) -> Recipe:
        """The backbone's commands, under the user's options."""
        o = self.options
        return RECIPES[backbone](o.third_party, o.seed, o.smoke, o.threads)

    def experiment(self, name: str) -> Experiment:
        """One row of the table."""
        o = self.options
        rows = self.table.select(name)
        preset, sampler = rows[0].trained_by, rows[0].sampler
        cells = {row.nfe: row for row in rows}
        wanted, others = nfes_of(rows, o.nfes)
        train = None if preset.name in self.given else self.trained(preset)
        checkpoint = self.given.get(preset.name) or str(train.output)
        samples = {n: self.sampled(preset, sampler, n, train, checkpoint) for n in wanted}
        scores = {n: self.scored(preset, stage) for n, stage in samples.items()}
        return Experiment(name, preset, sampler, cells, train, checkpoint, samples, scores, others)

    def trained(self, preset: Preset) -> Stage:
        """The training of a row of Table 5; a fine-tune needs its baseline's."""
        if preset.name in self._trained:
            return self._trained[preset.name]
        o, recipe = self.options, self.recipe(preset.backbone)
        data, _ = data_stages(preset.dataset, recipe, o.work, o.data)
        needs, init, inputs = [data], "", []
        base = baseline_of(preset)
        if base is not None and base.name in self.given:
            init = self.given[base.name]
            inputs.append(init)
        elif base is not None:
            needs.append(self.trained(base))
            init = str(needs[-1].output)
        canonical = recipe.train_argv(preset, 1, "OUT", "DATA", "INIT" if init else "")
        small = recipe.small(preset)
        product, found = recipe.trained

        def build(folder: Path) -> list[Command]:
            return [recipe.train(preset, o.gpus, folder, data.output, init)]

        total = {"edm": small.images / 1000}.get(preset.backbone, small.steps)
        self._trained[preset.name] = Stage(
            f"{preset.name}/train", "train", o.work, recipe.canonical(canonical), build, product,
            found, tuple(needs), tuple(inputs + recipe.configs(preset)), group=preset.backbone,
            units=small.images * (2.0 if preset.ogdm else 1.0), meter=(recipe.meter, total),
        )  # fmt: skip
        return self._trained[preset.name]

    def sampled(self, preset, sampler, nfe, train: Stage | None, checkpoint: str) -> Stage:
        """Table 6's sampling at one NFE."""
        o, recipe = self.options, self.recipe(preset.backbone)
        canonical = recipe.sample_argv(preset, 1, "OUT", "MODEL", sampler, nfe, o.samples)
        product, found = recipe.sampled

        def build(folder: Path) -> list[Command]:
            return [recipe.sample(preset, o.gpus, folder, checkpoint, sampler, nfe, o.samples)]

        return Stage(
            f"{preset.name}/{sampler}-{nfe}/sample", "sample", o.work, recipe.canonical(canonical),
            build, product, found, (train,) if train else (), () if train else (checkpoint,),
            recipe.scrap, preset.backbone, units=o.samples * (nfe + 20),
        )  # fmt: skip

    def scored(self, preset: Preset, samples: Stage) -> Stage:
        """FID and recall against the training set."""
        o = self.options
        _, reference = data_stages(preset.dataset, self.recipe(preset.backbone), o.work, o.data)
        how = evaluation_flags(o)

        def build(folder: Path) -> list[Command]:
            argv = [sys.executable, "-m", "run.evaluate", str(reference.output)]
            argv += [str(samples.output), "--json", str(folder / "scores.json"), *how]
            argv += ["--cache", str(o.out / "evaluation-cache")]
            return [Command(tuple(argv), env=environment())]

        return Stage(
            samples.name.replace("/sample", "/evaluate"), "evaluate", o.work,
            (o.evaluator, o.features), build, "scores.json", needs=(samples, reference),
            inputs=(o.weights,) if o.weights else (), units=o.samples + 5_000.0,
        )  # fmt: skip


def evaluation_flags(options: Options) -> list[str]:
    """What `python -m run.evaluate` is told about features."""
    flags = ["--evaluator", options.evaluator] if options.evaluator != "torch" else []
    features = options.features or (SMOKE_FEATURES if options.smoke else "")
    if features:
        return [*flags, "--features", features]
    return [*flags, "--weights", options.weights] if options.weights else flags


def nfes_of(rows: Sequence[paper.Row], asked: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """NFEs of a row to sample, the paper's if none are `asked` for, and those it cannot spend."""
    wanted, others = [], []
    for nfe in asked or [row.nfe for row in rows if row.fid is not None]:
        (wanted if reachable(rows[0].sampler, nfe) else others).append(nfe)
    return wanted, others


def reachable(sampler: str, nfe: int) -> bool:
    """Whether the sampler can spend exactly `nfe` evaluations of the network."""
    try:
        steps_for_nfe(sampler, nfe)
    except ValueError:
        return False
    return True
