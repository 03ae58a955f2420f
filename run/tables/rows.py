"""From a table's rows to jobs: for each row data, training, sampling and scores."""

import difflib
import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ogdm_core.nfe import steps_for_nfe
from run import backbones
from run.launch import Command, Engine, module, python_path
from run.presets import Preset, get_preset

from . import datasets, paper
from .jobs import Job, chain, training_settings
from .scale import CLASSIFIER, Scale

GUIDE_NFE = 35


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    number: int
    rows: tuple[str, ...] = ()  # names or globs; all if empty
    nfes: tuple[int, ...] = ()  # all of the table's if empty
    images: int = 0  # samples per cell; 0: the scale's
    checkpoints: tuple[tuple[str, str], ...] = ()  # (row or preset, path)
    sets: tuple[tuple[str, str, str, str], ...] = ()  # (row or preset or glob, job, flag, value)
    scale: Scale = field(default_factory=Scale)
    from_scratch: bool = False  # train baselines of which the weights are shipped, too
    out: Path = Path("out/tables")
    data: Path = Path("data")
    weights: str = ""  # Inception's
    features: str = ""  # module:attribute, in place of Inception
    evaluator: str = "torch"
    seeds: tuple[int, ...] = (0,)
    jobs: int = 1
    slurm: bool = False
    time_limit: int = 0  # minutes of a job, which Slurm is told; 0: by kind
    engine: Engine = field(default_factory=Engine)

    @property
    def samples(self) -> int:
        return self.images or self.scale.images

    @property
    def table(self) -> paper.Table:
        return self.scale.table(self.number)

    @property
    def net(self) -> str:
        """The feature net or nets, or CLASSIFIER; empty for Inception."""
        inception = self.weights and not self.scale.data
        return self.features or ("" if inception else self.scale.features)


@dataclass(frozen=True)
class Row:
    """One row of a table: its training by one seed, and for each NFE sampling and scores."""

    name: str
    preset: Preset  # as it is trained
    sampler: str
    cells: dict[int, paper.Cell]
    seed: int
    train: Job | None  # None: a checkpoint was given
    checkpoint: str  # path of the weights that are sampled, there or to come
    samples: dict[int, Job]
    scores: dict[int, Job]
    others: list[int]  # NFEs that were asked for and the sampler cannot hit

    def chain(self, pending: bool = False) -> list[Job]:
        """Its jobs, needs first."""
        return chain(self.scores.values(), pending)


def select_rows(table: paper.Table, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names of rows in the table's order, what is wrong with the patterns)."""
    chosen, problems = set(), []
    for pattern in patterns or ("*",):
        found = fnmatch.filter(table.names, pattern)
        chosen |= set(found)
        if not found:
            near = difflib.get_close_matches(pattern, table.names, 4, 0.5) or table.names
            words = f"has no row {pattern!r}; near are {', '.join(near)}"
            none = "is for --scale smoke, cpu and cpu-mnist" if table.ours else "has no rows here"
            problems.append(f"--rows: Table {table.number} {words if near else none}")
    return [name for name in table.names if name in chosen], problems


def presets_of(table: paper.Table) -> dict[str, str]:
    """Names that --checkpoint takes: rows, and the rows of Table 5 that they rest on."""
    names = {}
    for cell in table.cells:
        names[cell.row] = names[cell.preset] = cell.preset
        if base := cell.trained_by.baseline:
            names[base] = base
    return names


def without_gradients(sampler: str, nfe: int) -> tuple[str, int]:
    """What runs: dg is Heun's method, and of its 3N - 2 evaluations N - 1 are a guide's gradients.

    Raises ValueError where the sampler cannot spend exactly `nfe`.
    """
    if sampler == "dg":
        steps, rest = divmod(nfe + 2, 3)
        if rest or not steps:
            raise ValueError(f"dg cannot spend {nfe}: for N steps it is 3N - 2")
        return "heun", 2 * steps - 1
    steps_for_nfe(sampler, nfe)
    return sampler, nfe


def reachable(sampler: str, nfe: int) -> bool:
    """Whether the sampler can spend exactly `nfe` evaluations of the network."""
    try:
        without_gradients(sampler, nfe)
    except ValueError:
        return False
    return True


class Planner:
    """Makes the jobs of rows; jobs that rows share are made once."""

    def __init__(self, options: Options):
        self.options, self.scale, self.table = options, options.scale, options.table
        known = presets_of(self.table)
        self.given = {known[name]: path for name, path in options.checkpoints if name in known}
        self._trained: dict[tuple[str, int], Job] = {}

    def set_for(self, preset: Preset, job: str) -> dict[str, str | None]:
        """The native flags that --set gives this preset's training ("train") or its sampling."""
        names = [preset.name, *(cell.row for cell in self.table.cells if cell.preset == preset.name)]
        return {
            flag: value or None for pattern, kind, flag, value in self.options.sets
            if kind == job and fnmatch.filter(names, pattern)
        }  # fmt: skip

    def shown(self, seed: int) -> int | None:
        """What a job says about its seed: nothing, where there is one only."""
        return seed if len(self.options.seeds) > 1 else None

    def rows(self) -> list[Row]:
        """The rows that --rows names, each once per seed."""
        names = select_rows(self.table, self.options.rows)[0]
        return [self.row(name, seed) for name in names for seed in self.options.seeds]

    def row(self, name: str, seed: int) -> Row:
        """One row of the table."""
        cells = {cell.nfe: cell for cell in self.table.select(name)}
        first = next(iter(cells.values()))
        preset, sampler = first.trained_by, first.sampler
        open_too = self.scale.controls or self.table.ours  # NFEs that the paper does not have
        asked = self.options.nfes or [n for n, c in cells.items() if open_too or c.fid is not None]
        wanted = [nfe for nfe in asked if reachable(sampler, nfe)]
        train = None if preset.name in self.given else self.trained(preset, seed)
        checkpoint = self.given.get(preset.name) or str(train.output)
        samples = {n: self.sampled(preset, sampler, n, seed, train, checkpoint) for n in wanted}
        scores = {n: self.scored(preset, job) for n, job in samples.items()}
        others = [nfe for nfe in asked if nfe not in wanted]
        return Row(name, self.scale.preset(preset), sampler, cells, seed, train, checkpoint,
                   samples, scores, others)  # fmt: skip

    def trained(self, preset: Preset, seed: int) -> Job:
        """The training of a row of Table 5; a fine-tune needs its baseline's.

        Baselines are trained once, by the first seed: fine-tunes by several seeds share theirs.
        """
        o, baseline = self.options, preset.training == "baseline"
        seed = o.seeds[0] if baseline else seed
        if (preset.name, seed) not in self._trained:
            shipped = None if o.from_scratch else self.scale.shipped(preset)
            made = self.unpacked(preset, shipped) if shipped else self._training(preset, seed)
            self._trained[preset.name, seed] = made
        return self._trained[preset.name, seed]

    def unpacked(self, preset: Preset, shipped: Path) -> Job:
        """A baseline that comes with this repository, as its backbone's own kind of checkpoint."""
        o, output_name = self.options, backbones.get(preset.backbone).model

        def build(folder: Path) -> Command:
            return module("run.tables.baselines", "unpack", preset.backbone, shipped, folder / output_name,
                          **{"--third-party": o.engine.third_party})  # fmt: skip

        return Job(preset.name, "weights", o.out, {}, build, output_name, inputs=(str(shipped),))

    def _training(self, preset: Preset, seed: int) -> Job:
        o, scale, images = self.options, self.scale, self.data(preset)[0]
        backbone = backbones.get(preset.backbone)
        needs, init, inputs = [images], "", []
        if preset.baseline in self.given:
            init = self.given[preset.baseline]
            inputs.append(init)
        elif preset.baseline:
            needs.append(self.trained(get_preset(preset.baseline), seed))
            init = str(needs[-1].output)
        as_run, changed = scale.preset(preset), self.set_for(preset, "train")
        more = scale.training(as_run, init, seed) | changed
        inputs += backbone.config_files(more)
        if scale.data:
            more |= backbone.stand_in_folder(images.output)

        def build(folder: Path, engine: Engine = o.engine) -> Command:
            return backbone.train(as_run, str(images.output), folder, init, seed, engine, more)

        settings = training_settings(build(Path(), Engine()), as_run, scale.name, seed, changed)
        return Job(
            preset.name, "train", o.out, settings, build, backbone.model, backbone.weights, tuple(needs), tuple(inputs),
            as_run, 0, o.engine, self.shown(seed),
        )  # fmt: skip

    def sampled(self, preset: Preset, sampler: str, nfe: int, seed: int, train: Job | None, checkpoint: str) -> Job:
        """Table 6's sampling at one NFE."""
        o, backbone = self.options, backbones.get(preset.backbone)
        more: dict[str, Any] = dict(self.scale.sampling(preset, o.samples))
        known = backbone.sample(preset, "", Path(), *without_gradients(sampler, nfe)).flags
        shared = {n: v for n, v in self.set_for(preset, "train").items() if n in known}
        more |= shared | self.set_for(preset, "sample")
        needs = [train] if train else []
        if sampler == "dg":
            needs.append(self.guide(preset, seed, train, checkpoint))
            more |= {"--guide": needs[-1].output, "--guide-weight": 1}

        def build(folder: Path) -> Command:
            return backbone.sample(preset, checkpoint, folder, *without_gradients(sampler, nfe), o.samples, seed,
                                   o.engine, more)  # fmt: skip

        return Job(
            f"{preset.name}.{sampler}-{nfe}", "sample", o.out, build(Path()).settings(backbone.not_in_key), build,
            "samples.npz", backbone.samples, tuple(needs), () if train else (checkpoint,), preset, nfe,
            backbone.sampling_engine(o.engine), self.shown(seed),
        )  # fmt: skip

    def guide(self, preset: Preset, seed: int, train: Job | None, checkpoint: str) -> Job:
        """A discriminator between the training set and samples of the row's own model (Table 7),
        which are those of EDM's 18 steps of Heun's method."""
        o, reference = self.options, self.data(preset)[1]
        samples = self.sampled(preset, "heun", GUIDE_NFE, seed, train, checkpoint)
        flags = self.scale.guide | {"--seed": seed}

        def build(folder: Path) -> Command:
            places = {"--data": reference.output, "--samples": samples.output,
                      "--output": folder / "guide.safetensors"}  # fmt: skip
            launcher = (sys.executable, "-m", "run.guidance")
            return Command(launcher, "train", flags | places, env={"PYTHONPATH": python_path()})

        return Job(preset.name, "guide", o.out, flags, build, "guide.safetensors",
                   needs=(samples, reference))  # fmt: skip

    def scored(self, preset: Preset, samples: Job) -> Job:
        """FID and recall against the training set."""
        o, needs = self.options, [samples, self.data(preset)[1]]
        flags = {"--evaluator": o.evaluator} if o.evaluator != "torch" else self.scale.evaluation(o.samples)
        if o.net == CLASSIFIER:
            needs.append(datasets.classifier(self.scale, o.out))
            flags["--features"] = needs[-1].output
        elif o.net:
            flags["--features"] = o.net
        elif o.weights:
            flags["--weights"] = o.weights

        def build(folder: Path) -> Command:
            places = {"--json": folder / "scores.json", "--cache": o.out / "evaluation-cache"}
            return module("run.evaluate", needs[1].output, samples.output, **flags, **places)

        settings = {"evaluator": o.evaluator, "features": o.features}
        return Job(samples.row, "score", o.out, settings, build, "scores.json", "",
                   tuple(needs), (o.weights,) if o.weights else (), seed=samples.seed)  # fmt: skip

    def data(self, preset: Preset) -> tuple[Job, Job]:
        """What the backbone trains on, and the images that FID is measured against."""
        o, backbone = self.options, backbones.get(preset.backbone)
        if self.scale.data:
            return datasets.stand_in(self.scale, backbone, o.out, o.engine)
        return datasets.real(preset.dataset, backbone, o.out, o.data, o.engine, self.scale.size)
