"""All that can be known to be wrong before anything starts, in one list."""

import fnmatch
import importlib.util
import os
import shutil
from pathlib import Path

import torch

from run import backbones
from run.backbones.base import Backbone
from run.evaluate import adm as adm_evaluator
from run.evaluate.features import check_features
from run.launch import is_url
from run.presets import Preset, get_preset

from .datasets import SOURCES, source_of
from .jobs import chain
from .rows import Options, Row, presets_of, reachable
from .scale import CLASSIFIER


def problems(options: Options, rows: list[Row]) -> list[str]:
    """One line per problem, each saying what to do; empty if a run may start."""
    found = _settings(options, rows) + _checkpoints(options)
    if importlib.util.find_spec("snakemake") is None:
        found.append("snakemake cannot be imported; pip install -e '.[tables]' brings it")
    for backbone in dict.fromkeys(backbone_of(row.preset) for row in rows):
        found += _upstream(options, backbone)
    if not options.scale.data:
        third_party = options.engine.third_party
        needed = [backbone_of(p).missing_weights(p, third_party, p.baseline or "") for p in trained(rows)]
        found += _data(options, rows) + list(filter(None, needed))
    return found + _evaluator(options) + _disk(options, rows)


def backbone_of(preset: Preset) -> Backbone:
    """The backbone that trains this preset."""
    return backbones.get(preset.backbone)


def trained(rows: list[Row]) -> list[Preset]:
    """The presets that are trained for these rows; a fine-tune needs its baseline."""
    jobs = chain(row.train for row in rows if row.train)
    return [job.preset for job in jobs if job.kind == "train" and job.preset]


def _settings(options: Options, rows: list[Row]) -> list[str]:
    found, engine, table = [], options.engine, options.table
    names = presets_of(table)
    for pattern, *_ in options.sets:
        if not fnmatch.filter(names, pattern):
            found.append(f"--set: Table {table.number} has no row {pattern!r}; --list shows them")
    samplers = sorted({row.sampler for row in rows})
    for nfe in options.nfes:
        if samplers and not any(reachable(sampler, nfe) for sampler in samplers):
            found.append(f"--nfes: {', '.join(samplers)} cannot spend exactly {nfe}; the table "
                         f"has {', '.join(map(str, table.nfes))}")  # fmt: skip
    for preset in trained(rows):
        found += engine.check(preset)
    if engine.nodes > 1 and not options.slurm:
        found.append("--nodes: on several nodes it is Slurm that starts the jobs; add --slurm")
    elif not (options.scale.small or options.slurm) and 0 < (there := torch.cuda.device_count()) < engine.gpus:
        found.append(f"--gpus: {engine.gpus} asked for, {there} here")
    return list(dict.fromkeys(found))


def _checkpoints(options: Options) -> list[str]:
    table = options.table
    known, found, seen = presets_of(table), [], {}
    for name, path in options.checkpoints:
        if name not in known:
            found.append(f"--checkpoint: {name} is no row of Table {table.number} and no preset of one; those are "
                         f"{', '.join(known)}")  # fmt: skip
            continue
        if seen.setdefault(known[name], path) != path:
            found.append(f"--checkpoint: {known[name]} is given as {seen[known[name]]} and as {path}; give one")
        backbone = backbone_of(get_preset(known[name]))
        if is_url(path):
            problem = "" if backbone.reads_urls else f"{backbone.folder}'s scripts read no URLs; download {path}"
        elif not Path(path).is_file():
            problem = f"there is no file {path}"
        else:
            problem = backbone.check_checkpoint(path)
        found += [f"--checkpoint: {name}: {problem}"] if problem else []
    return found


def _upstream(options: Options, backbone: Backbone) -> list[str]:
    problem = backbone.not_ready(options.engine.third_party)
    absent = [name for name in backbone.packages if importlib.util.find_spec(name) is None]
    extra = f"pip install -e '.[{backbone.name}]' brings it"
    missing = f"{backbone.name}: {', '.join(absent)} cannot be imported; {extra}"
    return [problem] * bool(problem) + [missing] * bool(absent)


def _data(options: Options, rows: list[Row]) -> list[str]:
    training = {(preset.dataset, backbone_of(preset)) for preset in trained(rows)}
    pairs = [(row.preset.dataset, backbone_of(row.preset)) for row in rows]
    texts = [missing(*pair, options.data, pair in training, options.scale.size) for pair in pairs]
    return list(filter(None, dict.fromkeys(texts)))


def missing(dataset: str, backbone: Backbone, data: Path, training: bool, size: int = 0) -> str:
    """What to do if a data set is neither prepared in `data` nor there as its archive."""
    source = source_of(dataset, size)
    archive = backbone.archive(source.packed)
    wanted = [data / source.folder] + [data / archive] * bool(archive and training)
    absent = [str(path) for path in wanted if not path.exists()]
    if not absent or (data / source.archive).is_file():
        return ""
    return (
        f"{dataset}: there is no {data / source.archive} to prepare it from, and no "
        f"{' and no '.join(absent)} either; get {source.archive} from {source.url}, or give the "
        "folder that has it with --data"
    )


def _evaluator(options: Options) -> list[str]:
    """What the evaluation would refuse after all the training."""
    net, weights = options.net, Path(options.weights) if options.weights else None
    what = "--features" if options.features else f"--scale {options.scale.name}'s features"
    if net and options.evaluator != "torch":
        return [f"--evaluator adm: guided-diffusion's knows Inception only, not {what}; leave out "
                "one of the two"]  # fmt: skip
    if net and weights:
        return [f"--weights {weights}: these are Inception's, which {what} take the place of; "
                "leave out --weights"]  # fmt: skip
    try:
        if options.evaluator != "torch":
            adm_evaluator.check_files(weights)
        elif net != CLASSIFIER:
            for one in net.split(","):
                check_features(one, weights)
    except ValueError as error:
        return [" ".join(str(error).split())]
    return []


# ---- disk ---------------------------------------------------------------------------------------


def disk_gb(options: Options, rows: list[Row]) -> dict[str, float]:
    """GB that the data sets, the checkpoints and the samples of these rows take."""
    if options.scale.gigabytes:
        return {f"{options.scale.name} run": options.scale.gigabytes}
    data = {row.preset.dataset: SOURCES[row.preset.dataset].gigabytes for row in rows}
    cell = {name: options.samples * 3 * SOURCES[name].size ** 2 / 1e9 for name in data}
    samples = sum(len(row.samples) * cell[row.preset.dataset] for row in rows)
    pictures = max(cell.values(), default=0.0)  # one cell's images as files, then removed
    checkpoints = 0.0
    for preset in trained(rows):
        checkpoints += backbone_of(preset).checkpoint_gb * backbone_of(preset).checkpoints_kept(preset)
    return {"data": sum(data.values()), "checkpoints": checkpoints, "samples": samples + pictures}


def used_gb(path: Path) -> float:
    """GB of a file, or of the files in a folder."""
    return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if file.is_file()) / 1e9


def _disk(options: Options, rows: list[Row]) -> list[str]:
    need = sum(disk_gb(options, rows).values()) - used_gb(options.out)
    if not options.scale.small:
        for name in dict.fromkeys(row.preset.dataset for row in rows):
            source = SOURCES[name]
            packed = [backbone_of(row.preset).archive(source.packed) for row in rows]
            there = {options.data / place for place in (source.folder, source.reference, *packed) if place}
            need -= min(sum(map(used_gb, there)), source.gigabytes)
    place = options.out.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return [f"--out: {place} is no folder that can be written; give another"]
    free = shutil.disk_usage(place).free / 1e9
    text = (f"--out: {need:.0f} GB are needed, {free:.0f} GB are free at {place}; give another "
            "folder, or fewer --rows or --images")  # fmt: skip
    return [text] if free < need else []
