"""All that can be known to be wrong before anything starts, in one list."""

import fnmatch
import importlib.util
import os
import shutil
from pathlib import Path

from run.train import commands
from run.train.presets import Preset, get_preset

from .datasets import EDM_ZIP, REFERENCE_SIZE, SOURCES
from .jobs import chain
from .rows import Options, Row, presets_of, reachable
from .scale import CLASSIFIER

PACKAGES = {"adm": ("mpi4py", "blobfile"), "edm": ("click", "psutil"),
            "ldm": ("pytorch_lightning", "omegaconf", "einops")}  # fmt: skip
# GB of a checkpoint at the paper's size: network, EMA, two moments of Adam, and D with its own.
CHECKPOINT_GB = {"adm": 1.2, "edm": 1.2, "ldm": 5.5}
FIRST_STAGE = "models/first_stage_models/kl-f8/model.ckpt"


def problems(options: Options, rows: list[Row]) -> list[str]:
    """One line per problem, each saying what to do; empty if a run may start."""
    found = _settings(options, rows) + _checkpoints(options)
    if importlib.util.find_spec("snakemake") is None:
        found.append("snakemake cannot be imported; pip install -e '.[tables]' brings it")
    for backbone in dict.fromkeys(row.preset.backbone for row in rows):
        found += _upstream(options, backbone)
    if not options.scale.data:
        found += _data(options, rows) + _first_stage(options, rows)
    return found + _evaluator(options) + _disk(options, rows)


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
    elif engine.gpus > 1 and not options.scale.small and not options.slurm:
        import torch

        if 0 < (there := torch.cuda.device_count()) < engine.gpus:
            found.append(f"--gpus: {engine.gpus} asked for, {there} here")
    return list(dict.fromkeys(found))


def _checkpoints(options: Options) -> list[str]:
    from ogdm_core.ldm.export import run_configs

    table = options.table
    known, found, seen = presets_of(table), [], {}
    for name, path in options.checkpoints:
        if name not in known:
            found.append(f"--checkpoint: {name} is no row of Table {table.number} and no preset "
                         f"of one; those are {', '.join(known)}")  # fmt: skip
            continue
        if seen.setdefault(known[name], path) != path:
            found.append(f"--checkpoint: {known[name]} is given as {seen[known[name]]} and as "
                         f"{path}; give one")  # fmt: skip
        url, backbone = path.startswith(("http://", "https://")), get_preset(known[name]).backbone
        if url and backbone != "edm":
            found.append(f"--checkpoint: {name}: only EDM's scripts read URLs; download {path}")
        elif not url and not Path(path).is_file():
            found.append(f"--checkpoint: {name}: there is no file {path}")
        elif backbone == "ldm" and not (Path(path).with_name("config.yaml").is_file() or run_configs(path)):
            found.append(f"--checkpoint: {name}: no config.yaml beside {path}, and it is in no "
                         "training run; latent-diffusion needs the model's config")  # fmt: skip
    return found


def _upstream(options: Options, backbone: str) -> list[str]:
    problem = commands.not_ready(backbone, options.engine.third_party)
    absent = [name for name in PACKAGES[backbone] if importlib.util.find_spec(name) is None]
    missing = (f"{backbone}: {', '.join(absent)} cannot be imported; pip install -e "
               f"'.[{backbone}]' brings it")  # fmt: skip
    return [problem] * bool(problem) + [missing] * bool(absent)


def _data(options: Options, rows: list[Row]) -> list[str]:
    training = {(preset.dataset, preset.backbone) for preset in trained(rows)}
    pairs = [(row.preset.dataset, row.preset.backbone) for row in rows]
    texts = [missing(*pair, options.data, pair in training) for pair in pairs]
    return list(filter(None, dict.fromkeys(texts)))


def missing(dataset: str, backbone: str, data: Path, training: bool) -> str:
    """What to do if a data set is neither prepared in `data` nor there as its archive."""
    source = SOURCES[dataset]
    wanted = [data / source.folder] + [data / EDM_ZIP] * (backbone == "edm" and training)
    absent = [str(path) for path in wanted if not path.exists()]
    if not absent or (data / source.archive).is_file():
        return ""
    return (
        f"{dataset}: there is no {data / source.archive} to prepare it from, and no "
        f"{' and no '.join(absent)} either; get {source.archive} from {source.url}, or give the "
        "folder that has it with --data"
    )


def _first_stage(options: Options, rows: list[Row]) -> list[str]:
    wanted = [p for p in trained(rows) if p.backbone == "ldm" and p.training == "baseline"]
    path = options.engine.third_party / commands.UPSTREAM["ldm"] / FIRST_STAGE
    if not wanted or path.is_file():
        return []
    return [f"{wanted[0].name}: there is no {path}, the autoencoder that it trains in the latents "
            "of; upstream's scripts/download_first_stages.sh fetches it. Or start from the "
            f"released model: --checkpoint {wanted[0].name}=model.ckpt"]  # fmt: skip


def _evaluator(options: Options) -> list[str]:
    """What the evaluation would refuse after all the training."""
    from run.evaluate import adm
    from run.evaluate.features import check_features

    net, weights = options.net, Path(options.weights) if options.weights else None
    what = "--features" if options.features else f"--scale {options.scale.name}'s features"
    if net and options.evaluator == "adm":
        return [f"--evaluator adm: guided-diffusion's knows Inception only, not {what}; leave out "
                "one of the two"]  # fmt: skip
    if net and weights:
        return [f"--weights {weights}: these are Inception's, which {what} take the place of; "
                "leave out --weights"]  # fmt: skip
    try:
        if options.evaluator == "adm":
            adm.check_files(weights)
        elif net != CLASSIFIER:
            check_features(net, weights)
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
    for preset in trained(rows):  # ADM writes one every 10,000 steps; LDM keeps three and the last
        kept = {"adm": preset.steps // 10_000 + 1, "edm": commands.EDM_DUMPS, "ldm": 4}
        checkpoints += CHECKPOINT_GB[preset.backbone] * kept[preset.backbone]
    return {"data": sum(data.values()), "checkpoints": checkpoints, "samples": samples + pictures}


def used_gb(path: Path) -> float:
    """GB of a file, or of the files in a folder."""
    return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if file.is_file()) / 1e9


def _disk(options: Options, rows: list[Row]) -> list[str]:
    need = sum(disk_gb(options, rows).values()) - used_gb(options.out)
    if not options.scale.data:
        extra = {"cifar10": EDM_ZIP, "lsun-church": f"lsun-{REFERENCE_SIZE}"}
        for name in dict.fromkeys(row.preset.dataset for row in rows):
            there = [options.data / SOURCES[name].folder, options.data / extra.get(name, "-")]
            need -= min(sum(map(used_gb, there)), SOURCES[name].gigabytes)
    place = options.out.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return [f"--out: {place} is no folder that can be written; give another"]
    free = shutil.disk_usage(place).free / 1e9
    text = (f"--out: {need:.0f} GB are needed, {free:.0f} GB are free at {place}; give another "
            "folder, or fewer --rows or --images")  # fmt: skip
    return [text] if free < need else []
