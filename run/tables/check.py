"""All that can be known to be wrong before anything starts, in one list."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from ogdm_core.splice.export import run_configs
from run.evaluate import adm
from run.evaluate.features import check_features
from run.train.presets import PRESETS, Preset

from . import paper
from .experiments import Options, baseline_of, nfes_of, presets_of, reachable, select_rows
from .recipes import EDM, LDM, RECIPES
from .sources import SOURCES, missing, prepared

# GB of a checkpoint at the paper's size: network, EMA, two moments of Adam, and D with its own.
CHECKPOINT_GB = {"adm": 1.2, "edm": 1.2, "ldm": 5.5}
ADM_INTERVAL, LDM_KEPT = (
    10_000,
    4,
)  # upstream's: steps between checkpoints; the best three, the last
SMOKE_GB = 1.0
LEAST_IMAGES = 4  # recall looks at three neighbours of each


def problems(options: Options) -> list[str]:
    """One line a problem, each saying what to do; empty if a run may start."""
    table = paper.table(options.number)
    names, found = select_rows(table, options.rows)
    found += _settings(options, table, names)
    found += _checkpoints(options, table)
    presets = needed(options, names)
    backbones = dict.fromkeys(preset.backbone for preset in presets["sample"])
    for backbone in backbones:
        found += _upstream(options, backbone)
    if not options.smoke:
        found += _data(options, presets)
        found += _first_stage(options, presets)
    found += _evaluator(options)
    found += _disk(options, presets, names)
    return found


def needed(options: Options, names: list[str]) -> dict[str, list[Preset]]:
    """Presets that are sampled, and those that are trained: fine-tunes need their baselines."""
    table = paper.table(options.number)
    known = presets_of(table)
    given = {known[name] for name, _ in options.checkpoints if name in known}
    sampled = list(dict.fromkeys(table.select(name)[0].preset for name in names))
    trained: dict[str, None] = {}
    for name in sampled:
        if name in given:
            continue
        base = baseline_of(PRESETS[name])
        if base is not None and base.name not in given:
            trained[base.name] = None
        trained[name] = None
    return {"sample": [PRESETS[n] for n in sampled], "train": [PRESETS[n] for n in trained]}


def _settings(options: Options, table: paper.Table, names: list[str]) -> list[str]:
    found = []
    if options.images and options.images < LEAST_IMAGES:
        found.append(f"--images: {options.images}; FID and recall need {LEAST_IMAGES} at the "
                     "least, the paper took 50000")  # fmt: skip
    if options.gpus < 1:
        found.append(f"--gpus: {options.gpus}; give 1 or more")
    if options.jobs < 1:
        found.append(f"--jobs: {options.jobs}; give 1 or more")
    samplers = {table.select(name)[0].sampler for name in names}
    for nfe in options.nfes:
        if samplers and not any(reachable(sampler, nfe) for sampler in samplers):
            found.append(f"--nfes: {', '.join(sorted(samplers))} cannot spend exactly {nfe}; the "
                         f"table has {', '.join(map(str, table.nfes))}")  # fmt: skip
    for preset in needed(options, names)["train"]:
        batch = RECIPES[preset.backbone](options.third_party, smoke=options.smoke).small(preset)
        if options.gpus > 0 and batch.batch % options.gpus:
            found.append(f"--gpus: {options.gpus} does not divide {preset.name}'s batch of "
                         f"{batch.batch}")  # fmt: skip
    if not options.smoke and options.gpus > 1 and 0 < (there := _cuda_devices()) < options.gpus:
        found.append(f"--gpus: {options.gpus} asked for, {there} here")
    return found


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _checkpoints(options: Options, table: paper.Table) -> list[str]:
    known, found, seen = presets_of(table), [], {}
    for name, path in options.checkpoints:
        if name not in known:
            found.append(f"--checkpoint: {name} is no row of Table {table.number} and no preset "
                         f"of one; those are {', '.join(known)}")  # fmt: skip
            continue
        if seen.setdefault(known[name], path) != path:
            found.append(f"--checkpoint: {known[name]} is given as {seen[known[name]]} and as "
                         f"{path}; give one")  # fmt: skip
        url = path.startswith(("http://", "https://"))
        if url and PRESETS[known[name]].backbone != "edm":
            found.append(f"--checkpoint: {name}: only EDM's scripts read URLs; download {path}")
        elif not url and not Path(path).is_file():
            found.append(f"--checkpoint: {name}: there is no file {path}")
        elif PRESETS[known[name]].backbone == "ldm" and not _has_config(Path(path)):
            found.append(
                f"--checkpoint: {name}: no config.yaml beside {path}, and it is in no "
                "training run either; latent-diffusion needs the model's config"
            )
    return found


def _has_config(checkpoint: Path) -> bool:
    return checkpoint.with_name("config.yaml").is_file() or bool(run_configs(str(checkpoint)))


def _upstream(options: Options, backbone: str) -> list[str]:
    recipe = RECIPES[backbone]
    script = options.third_party / recipe.upstream / recipe.script
    found = []
    if not script.is_file():
        found.append(f"{backbone}: there is no {script}; run/setup.sh {recipe.upstream} fetches it")
    elif "ogdm_core" not in script.read_text():
        found.append(f"{backbone}: {script.parent} is not patched; run/setup.sh {recipe.upstream} "
                     "applies our patches")  # fmt: skip
    absent = [name for name in recipe.packages if importlib.util.find_spec(name) is None]
    if absent:
        found.append(f"{backbone}: {', '.join(absent)} cannot be imported; pip install -e "
                     f"'.[{backbone}]' brings it")  # fmt: skip
    return found


def _data(options: Options, presets: dict[str, list[Preset]]) -> list[str]:
    trained = {(p.dataset, p.backbone) for p in presets["train"]}
    pairs = dict.fromkeys((p.dataset, p.backbone) for p in presets["sample"])
    texts = (missing(d, b, options.data, (d, b) in trained) for d, b in pairs)
    return [text for text in dict.fromkeys(texts) if text]


def _evaluator(options: Options) -> list[str]:
    """What the evaluation would refuse after all the training."""
    weights = Path(options.weights) if options.weights else None
    if options.evaluator == "adm":
        return _adm(options, weights)
    if options.smoke and not options.features:
        return []  # it brings a net of its own
    try:
        check_features(options.features, None if options.features else weights)
    except ValueError as error:
        return [" ".join(str(error).split())]
    module = options.features.partition(":")[0]
    if options.features and not _importable(module):
        return [f"--features: there is no module {module} to import; put its folder on PYTHONPATH"]
    return []


def _adm(options: Options, weights: Path | None) -> list[str]:
    found = []
    if options.features or options.smoke:
        what = "--features" if options.features else "--scale smoke's features"
        found.append(f"--evaluator adm: guided-diffusion's knows Inception only, not {what}; "
                     "leave out one of the two")  # fmt: skip
    if not adm.EVALUATOR.is_file():
        found.append(f"--evaluator adm: there is no {adm.EVALUATOR}; run/setup.sh "
                     "guided-diffusion fetches it")  # fmt: skip
    if weights and not weights.is_file():
        found.append(f"--weights {weights}: no such file; guided-diffusion's evaluator reads "
                     f"{adm.GRAPH}, and fetches it without the flag")  # fmt: skip
    return found


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package that is missing, or no name at all
        return False


def _first_stage(options: Options, presets: dict[str, list[Preset]]) -> list[str]:
    wanted = [p for p in presets["train"] if p.backbone == "ldm" and p.training == "baseline"]
    path = options.third_party / LDM.upstream / LDM.FIRST_STAGE
    if not wanted or path.is_file():
        return []
    return [f"{wanted[0].name}: there is no {path}, the autoencoder that it trains in the latents "
            "of; upstream's scripts/download_first_stages.sh fetches it. Or start from the "
            f"released model: --checkpoint {wanted[0].name}=model.ckpt"]  # fmt: skip


def checkpoints_kept(preset: Preset) -> int:
    """How many checkpoints a training leaves on the disk."""
    by_backbone = {"adm": preset.steps // ADM_INTERVAL + 1, "edm": EDM.DUMPS, "ldm": LDM_KEPT}
    return by_backbone[preset.backbone]


def disk_gb(
    options: Options, presets: dict[str, list[Preset]], names: list[str]
) -> dict[str, float]:
    """GB that the data sets, the checkpoints and the samples of the rows `names` take."""
    if options.smoke:
        return {"smoke run": SMOKE_GB}
    table = paper.table(options.number)
    data = {p.dataset: SOURCES[p.dataset].gigabytes for p in presets["sample"]}
    kept = sum(CHECKPOINT_GB[p.backbone] * checkpoints_kept(p) for p in presets["train"])
    cell = {name: options.samples * 3 * SOURCES[name].size ** 2 / 1e9 for name in data}
    samples = 0.0
    for rows in map(table.select, names):
        wanted, _ = nfes_of(rows, options.nfes)
        samples += len(wanted) * cell[rows[0].dataset]
    pictures = max(cell.values(), default=0.0)  # one cell's images as files, then removed
    return {"data": sum(data.values()), "checkpoints": kept, "samples": samples + pictures}


def _used(folder: Path) -> float:
    """GB of a file, or of the files in a folder: of what is needed, that much is there already."""
    if folder.is_file():
        return folder.stat().st_size / 1e9
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files) / 1e9


def _disk(options: Options, presets: dict[str, list[Preset]], names: list[str]) -> list[str]:
    need = sum(disk_gb(options, presets, names).values()) - _used(options.out)
    if not options.smoke:
        for dataset in dict.fromkeys(preset.dataset for preset in presets["sample"]):
            there = sum(map(_used, prepared(dataset, options.data)))
            need -= min(there, SOURCES[dataset].gigabytes)
    place = options.out.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return [f"--out: {place} is not writable"]
    free = shutil.disk_usage(place).free / 1e9
    if free < need:
        return [f"--out: {need:.0f} GB are needed, {free:.0f} GB are free at {place}; give another "
                "folder, or fewer --rows or --images"]  # fmt: skip
    return []
