"""From a table of the paper to jobs: for each row data, training, sampling and scores.

A job's key is a hash of its settings, of the files it was given from outside, and of the keys of
the jobs it needs; its folder carries the key in its name. So a changed setting makes a new folder
for what depends on it, and changing it back finds the old one. Paths, numbers of processes and the
version of the code are not in the key: another disk or more GPUs train nothing again.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ogdm_core.files import write_text
from ogdm_core.samplers import steps_for_nfe
from run.provenance import ROOT
from run.train import commands
from run.train.commands import Command, Engine
from run.train.presets import PRESETS, Preset

from . import paper, smoke

SMOKE_IMAGES, PAPER_IMAGES = 16, 50_000
GUIDE = {"--kind": "paper", "--width": 0.25, "--steps": 10_000}  # the paper names none of these
GUIDE_NFE = 35
WHOLE = 1 << 26  # files up to 64 MiB are hashed whole, of longer ones 64 pieces of 1 MiB


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    number: int
    rows: tuple[str, ...] = ()  # names or globs; all if empty
    nfes: tuple[int, ...] = ()  # all of the table's if empty
    images: int = 0  # samples per cell; 0: the paper's 50,000, or a few in a smoke run
    checkpoints: tuple[tuple[str, str], ...] = ()  # (row or preset, path)
    sets: tuple[tuple[str, str, str, str], ...] = ()  # (row or preset or glob, job, flag, value)
    smoke: bool = False
    out: Path = Path("out/tables")
    data: Path = Path("data")
    weights: str = ""  # Inception's
    features: str = ""  # module:attribute, in place of Inception
    evaluator: str = "torch"
    seed: int = 0
    jobs: int = 1
    slurm: bool = False
    engine: Engine = field(default_factory=Engine)

    @property
    def samples(self) -> int:
        return self.images or (SMOKE_IMAGES if self.smoke else PAPER_IMAGES)

    @property
    def net(self) -> str:
        """The feature net that is named by its import path; empty for Inception."""
        return self.features or (smoke.FEATURES if self.smoke else "")


@dataclass(frozen=True, eq=False)
class Job:
    """A command that makes one thing, `output`."""

    row: str  # as in cifar10-adm-baseline, or cifar10-adm-baseline.euler-10
    kind: str  # data | train | guide | sample | score
    out: Path
    settings: Mapping[str, Any]
    build: Callable[[Path], Command | None]  # the command for a folder; None: nothing is to be done
    product: str  # a path in its folder, or an absolute one
    found: str = ""  # glob in its folder: the newest match gets a link called `product`
    needs: tuple[Job, ...] = ()
    inputs: tuple[str, ...] = ()  # files from outside, or URLs
    preset: Preset | None = None  # of a training or a sampling, as it is run
    nfe: int = 0
    engine: Engine | None = None

    @property
    def name(self) -> str:
        return f"{self.row}.{self.kind}"

    @cached_property
    def key(self) -> str:
        """sha256 over all that the result depends on."""
        settings = {name: str(value) for name, value in self.settings.items()}
        inputs, needs = [fingerprint(path) for path in self.inputs], [job.key for job in self.needs]
        content = json.dumps([self.name, settings, inputs, needs], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def folder(self) -> Path:
        return self.out / "stages" / f"{self.name}-{self.key[:10]}"

    @property
    def output(self) -> Path:
        return self.folder / self.product

    @property
    def marker(self) -> Path:
        return self.folder / "done.json"

    def record(self) -> dict | None:
        """What is known of a finished job; None if it is not done, or its output is gone."""
        record = read_json(self.marker) if self.output.exists() else {}
        # An output outside of the folder is not in the key: what is there may be another's.
        return record if record.get("output") == str(self.output) else None

    def state(self) -> dict:
        """What the last attempt left: {"status": "running" | "failed" | "stopped", ...}, or {}."""
        return read_json(self.folder / "state.json")

    def command(self) -> Command | None:
        """What would run now: a training goes on from its own last checkpoint."""
        command = self.build(self.folder)
        if command and self.kind == "train" and self.preset:
            return commands.resumed(command, self.preset.backbone, self.folder)
        return command

    def to_json(self) -> dict:
        """All that run.tables.job needs to run it."""
        command = self.build(self.folder)
        return {
            "name": self.name, "kind": self.kind, "key": self.key, "folder": str(self.folder),
            "command": command and asdict(command), "needs": [j.folder.name for j in self.needs],
            "settings": {name: str(value) for name, value in self.settings.items()},
            "inputs": list(self.inputs), "output": str(self.output), "found": self.found,
            "backbone": self.preset.backbone if self.preset else "",
            "engine": self.engine and {n: str(v) if isinstance(v, Path) else v
                                       for n, v in asdict(self.engine).items()},
        }  # fmt: skip


def chain(jobs: Iterable[Job], pending: bool = False) -> list[Job]:
    """The jobs and all they need, each once, needs first; with `pending` only what is to be done.

    Finished jobs, and whatever only they depended on, are left out then.
    """
    ordered: dict[str, Job] = {}

    def visit(job: Job) -> None:
        if job.key in ordered or (pending and job.record()):
            return
        for need in job.needs:
            visit(need)
        ordered[job.key] = job

    for job in jobs:
        visit(job)
    return list(ordered.values())


def fingerprint(path: str) -> str:
    """A hash of a file's content; an URL or a path where nothing is stands for itself."""
    file = Path(path)
    if not file.is_file():
        return path
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as f:
        if size <= WHOLE:
            digest.update(f.read())
        else:
            for i in range(64):
                f.seek(i * (size - (1 << 20)) // 63)
                digest.update(f.read(1 << 20))
    return digest.hexdigest()


# ---- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row of a table: its training, and for each NFE the sampling and the scores."""

    name: str
    preset: Preset
    sampler: str
    cells: dict[int, paper.Row]
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
            problems.append(
                f"--rows: Table {table.number} has no row {pattern!r}; near are {', '.join(near)}"
            )
    return [name for name in table.names if name in chosen], problems


def presets_of(table: paper.Table) -> dict[str, str]:
    """Names that --checkpoint takes: rows, and the rows of Table 5 that they rest on."""
    names = {}
    for row in table.rows:
        names[row.row] = names[row.preset] = row.preset
        if base := PRESETS[row.preset].baseline:
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
        self.options, self.table = options, paper.table(options.number)
        known = presets_of(self.table)
        self.given = {known[name]: path for name, path in options.checkpoints if name in known}
        self._trained: dict[str, Job] = {}

    def set_for(self, preset: Preset, job: str) -> dict[str, str | None]:
        """The native flags that --set gives this preset's training ("train") or its sampling."""
        names = [preset.name, *(row.row for row in self.table.rows if row.preset == preset.name)]
        return {
            flag: value or None for pattern, kind, flag, value in self.options.sets
            if kind == job and fnmatch.filter(names, pattern)
        }  # fmt: skip

    def rows(self) -> list[Row]:
        """The rows that --rows names."""
        return [self.row(name) for name in select_rows(self.table, self.options.rows)[0]]

    def row(self, name: str) -> Row:
        """One row of the table."""
        cells = {cell.nfe: cell for cell in self.table.select(name)}
        first = next(iter(cells.values()))
        preset, sampler = first.trained_by, first.sampler
        asked = self.options.nfes or [n for n, cell in cells.items() if cell.fid is not None]
        wanted = [nfe for nfe in asked if reachable(sampler, nfe)]
        train = None if preset.name in self.given else self.trained(preset)
        checkpoint = self.given.get(preset.name) or str(train.output)
        samples = {n: self.sampled(preset, sampler, n, train, checkpoint) for n in wanted}
        scores = {n: self.scored(preset, job) for n, job in samples.items()}
        others = [nfe for nfe in asked if nfe not in wanted]
        return Row(name, preset, sampler, cells, train, checkpoint, samples, scores, others)

    def trained(self, preset: Preset) -> Job:
        """The training of a row of Table 5; a fine-tune needs its baseline's."""
        if preset.name in self._trained:
            return self._trained[preset.name]
        o, images = self.options, self.data(preset)[0]
        needs, init, inputs = [images], "", []
        if preset.baseline in self.given:
            init = self.given[preset.baseline]
            inputs.append(init)
        elif preset.baseline:
            needs.append(self.trained(PRESETS[preset.baseline]))
            init = str(needs[-1].output)
        as_run, more = (
            (smoke.small(preset), smoke.training(preset, init)) if o.smoke else (preset, {})
        )
        changed = self.set_for(preset, "train")
        more = {**more, **changed}
        if preset.backbone == "ldm":
            inputs += [path for path in more.get("--base", ()) if os.path.isabs(path)]

        def build(folder: Path, engine: Engine = o.engine) -> Command:
            data = str(images.output)
            place = smoke.folders(preset, data) if o.smoke else {}
            return commands.train(as_run, data, folder, init, o.seed, engine, {**more, **place})

        flags = build(Path(), Engine()).settings()
        settings = asdict(as_run) | {n: v for n, v in flags.items() if "ogdm" not in n} | changed
        self._trained[preset.name] = Job(
            preset.name, "train", o.out, settings | ({"scale": "smoke"} if o.smoke else {}), build,
            {"adm": "model.pt", "edm": "model.pkl", "ldm": "model.ckpt"}[preset.backbone],
            commands.WEIGHTS[preset.backbone], tuple(needs), tuple(inputs), as_run, 0, o.engine,
        )  # fmt: skip
        return self._trained[preset.name]

    def sampled(self, preset, sampler: str, nfe: int, train: Job | None, checkpoint: str) -> Job:
        """Table 6's sampling at one NFE."""
        o = self.options
        more: dict[str, Any] = dict(smoke.sampling(preset, o.samples)) if o.smoke else {}
        known = commands.sample(preset, "", Path(), *without_gradients(sampler, nfe)).flags
        shared = {n: v for n, v in self.set_for(preset, "train").items() if n in known}
        more |= shared | self.set_for(preset, "sample")
        needs = [train] if train else []
        if sampler == "dg":
            needs.append(self.guide(preset, train, checkpoint))
            more |= {"--guide": needs[-1].output, "--guide-weight": 1}

        def build(folder: Path) -> Command:
            return commands.sample(preset, checkpoint, folder, *without_gradients(sampler, nfe),
                                   o.samples, o.seed, o.engine, more)  # fmt: skip

        engine = replace(o.engine, gpus=1, nodes=1) if preset.backbone == "ldm" else o.engine
        return Job(
            f"{preset.name}.{sampler}-{nfe}", "sample", o.out, build(Path()).settings(), build,
            "samples.npz", "" if preset.backbone != "adm" else "samples_*.npz",
            tuple(needs), () if train else (checkpoint,), preset, nfe, engine,
        )  # fmt: skip

    def guide(self, preset: Preset, train: Job | None, checkpoint: str) -> Job:
        """A discriminator between the training set and samples of the row's own model (Table 7).

        The samples are those of EDM's 18 steps of Heun's method.
        """
        o, reference = self.options, self.data(preset)[1]
        samples = self.sampled(preset, "heun", GUIDE_NFE, train, checkpoint)
        flags = (smoke.GUIDE if o.smoke else GUIDE) | {"--seed": o.seed}

        def build(folder: Path) -> Command:
            places = {"--data": reference.output, "--samples": samples.output,
                      "--output": folder / "guide.safetensors"}  # fmt: skip
            command = module("train", **flags, **places)
            return replace(command, launcher=(*command.launcher, "run.guidance"))

        return Job(preset.name, "guide", o.out, flags, build, "guide.safetensors",
                   needs=(samples, reference))  # fmt: skip

    def scored(self, preset: Preset, samples: Job) -> Job:
        """FID and recall against the training set."""
        o, reference = self.options, self.data(preset)[1]
        flags = {"--evaluator": o.evaluator} if o.evaluator != "torch" else {}
        if o.net:
            flags["--features"] = o.net
        elif o.weights:
            flags["--weights"] = o.weights

        def build(folder: Path) -> Command:
            places = {"--json": folder / "scores.json", "--cache": o.out / "evaluation-cache"}
            return module("run.evaluate", reference.output, samples.output, **flags, **places)

        settings = {"evaluator": o.evaluator, "features": o.features}
        return Job(samples.row, "score", o.out, settings, build, "scores.json", "",
                   (samples, reference), (o.weights,) if o.weights else ())  # fmt: skip

    # ---- data -----------------------------------------------------------------------------------

    def data(self, preset: Preset) -> tuple[Job, Job]:
        """What the backbone trains on, and the images that FID is measured against.

        That is the whole training set.
        """
        o, edm = self.options, preset.backbone == "edm"
        if o.smoke:
            images = Job("digits", "data", o.out, {}, _digits, "images")
            return (self._zip("digits-zip", images) if edm else images), images
        images = Job(preset.dataset, "data", o.out, {}, lambda _: self._prepare(preset.dataset),
                     str(o.data / SOURCES[preset.dataset].folder))  # fmt: skip
        if preset.backbone == "ldm":
            place = o.data / f"lsun-{REFERENCE_SIZE}"
            return images, Job(
                "lsun-church-reference", "data", o.out, {"crop": REFERENCE_SIZE},
                lambda _: module("run.tables.reference", images.output, place,
                                 **{"--size": REFERENCE_SIZE}),
                str(place), needs=(images,),
            )  # fmt: skip
        return (self._zip("cifar10-zip") if edm else images), images

    def _prepare(self, dataset: str) -> Command | None:
        """run/prepare_data.sh; nothing if the folder is there and the archive is not."""
        source, data = SOURCES[dataset], self.options.data
        archive, folder = data / source.archive, data / source.folder
        home = self.options.engine.third_party / commands.UPSTREAM["ldm"]
        lsun = dataset == "lsun-church"
        if folder.exists() and not archive.is_file():
            place = home / "data" / "lsun"  # where latent-diffusion looks for it
            if not lsun or (place / CHURCHES).is_file():
                return None
            return Command((), "ln", native=("-sfn", str(folder.resolve()), str(place)))
        flags = {"--upstream": home} if lsun else {}
        if lsun and (data / VALIDATION).is_file():
            flags["--val"] = data / VALIDATION
        words = (source.command, str(archive), str(folder))
        return Command((str(ROOT / "run" / "prepare_data.sh"), *words[:2]), words[2], flags)

    def _zip(self, row: str, images: Job | None = None) -> Job:
        """EDM's own dataset_tool.py; nothing if its zip is there and the source is not."""
        o = self.options
        source = images.output if images else o.data / SOURCES["cifar10"].archive
        product = "digits.zip" if images else str(o.data / EDM_ZIP)

        def build(folder: Path) -> Command | None:
            if not images and (folder / product).is_file() and not source.exists():
                return None
            flags = {"--source": source, "--dest": folder / product}
            command = o.engine.command("edm", "dataset_tool.py", flags)
            return replace(command, launcher=(sys.executable,))

        return Job(row, "data", o.out, {}, build, product, needs=(images,) if images else ())


@dataclass(frozen=True)
class Source:
    """A data set as its owners give it out."""

    command: str  # of run/prepare_data.sh
    archive: str  # file name
    url: str  # where people get it
    folder: str  # ours, in --data
    size: int  # side of the images that are compared
    gigabytes: float  # what the prepared set takes on a disk, roughly


REFERENCE_SIZE = 256  # LSUN's images have sizes of their own; latent-diffusion is shown 256x256
SOURCES = {
    "cifar10": Source("cifar10", "cifar-10-python.tar.gz",
                      "https://www.cs.toronto.edu/~kriz/cifar.html", "cifar10", 32, 0.4),
    "celeba64": Source("celeba", "img_align_celeba.zip",
                       "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", "celeba64", 64, 1.8),
    "lsun-church": Source("lsun", "church_outdoor_train_lmdb.zip",
                          "https://github.com/fyu/lsun", "lsun", REFERENCE_SIZE, 18.0),
}  # fmt: skip
EDM_ZIP, VALIDATION = "cifar10-32x32.zip", "church_outdoor_val_lmdb.zip"
CHURCHES = "church_outdoor_train.txt"  # the list of images that run/prepare_data.sh writes


def module(name: str, *words: Any, **flags: Any) -> Command:
    """`python -m NAME`, with this repository and the user's own modules to import from."""
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(dict.fromkeys(map(os.path.abspath, [ROOT, *own])))
    words = tuple(map(str, words))
    return Command((sys.executable, "-m"), name, flags, None, {"PYTHONPATH": path}, native=words)


def _digits(folder: Path) -> Command:
    return module("run.tables.smoke", folder / "images")


def read_json(file: Path) -> dict:
    """What the file holds; {} where it is absent, or damaged by a disk or a machine that failed."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_plan(out: Path, name: str, pending: list[Job], resources: Callable[[Job], dict]) -> Path:
    """Writes what the Snakefile reads: every job that is to be done; returns the file.

    Its name ends in a hash of it: jobs that wait in a cluster's queue find the plan they belong to.
    """
    jobs = {job.folder.name: job.to_json() | {"resources": resources(job)} for job in pending}
    for job in jobs.values():
        job["needs"] = [need for need in job["needs"] if need in jobs]
    text = json.dumps({"name": name, "jobs": jobs}, indent=1, default=str) + "\n"
    path = out / "plans" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    write_text(path, text)
    return path
