"""Rows of Table 5 as the backbones' own commands: training, resuming, sampling as Table 6 does.

Settings are a mapping from here on; `Command` writes them out once, at the end:

    ADM   mpiexec -n N python scripts/image_train.py --flag value ...
    EDM   torchrun --nproc_per_node=N train.py --flag=value ...
    LDM   python main.py --flag value ... config.entry=value ...
"""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from run.provenance import ROOT

from .presets import DISCRETISATION, Preset

UPSTREAM = {"adm": "guided-diffusion", "edm": "edm", "ldm": "latent-diffusion"}
SCRIPT = {"adm": "scripts/image_train.py", "edm": "train.py", "ldm": "main.py"}
# Flags that say where, or over how many processes, and nothing about the result. (ADM's and LDM's
# batch sizes are per process; the whole batch is the preset's.)
PLACES = {"--data_dir", "--init_checkpoint", "--batch_size", "--resume_checkpoint", "--model_path",
          "--outdir", "--data", "--transfer", "--resume", "--network", "--npz", "--guide", "--gpus",
          "--num_nodes", "--snap", "--dump", "-l", "-r", "data.params.batch_size",
          "model.params.ckpt_path", "data.params.train.params.folder",
          "data.params.validation.params.folder"}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A native command: `flags` maps a flag to its value, None where it takes none.

    A tuple is several values. A name without a dash in front is an entry of LDM's config.
    """

    launcher: tuple[str, ...]
    script: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False  # --flag=value
    native: tuple[str, ...] = ()  # the user's own words; they come last, so they win

    @property
    def argv(self) -> list[str]:
        return [*self.launcher, self.script, *self._words(), *self.native]

    def _words(self) -> Iterator[str]:
        for name, value in self.flags.items():
            if value is None:
                yield name
            elif self.joined or not name.startswith("-"):
                yield f"{name}={value}"
            else:
                yield name
                yield from map(str, value if isinstance(value, tuple | list) else (value,))

    def __str__(self) -> str:
        """The line as one types it in a shell, and as it is run."""
        place = f"cd {shlex.quote(self.cwd)} && " if self.cwd else ""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.env.items())
        return f"{place}{variables}{shlex.join(self.argv)}"

    def run(self) -> int:
        """Runs it; the exit status."""
        env = os.environ | dict(self.env)
        return subprocess.run(self.argv, cwd=self.cwd, env=env).returncode

    def settings(self) -> dict[str, Any]:
        """What the result depends on: the flags without places and numbers of processes."""
        text = {n: str(v).replace(str(ROOT), "ROOT") for n, v in self.flags.items()}
        return {name: value for name, value in text.items() if name not in PLACES}


@dataclass(frozen=True)
class Engine:
    """The processes of a command: `gpus` in all, one per GPU, on `nodes` machines."""

    gpus: int = 1
    nodes: int = 1
    rendezvous: str = ""  # HOST:PORT of the first machine, for several of them without Slurm
    third_party: Path = ROOT / "third_party"
    threads: int = 0  # of each process on a CPU; 0 leaves it to torch

    def check(self, preset: Preset) -> list[str]:
        """What is wrong with these numbers for this preset."""
        found = []
        if preset.batch % self.gpus:
            found.append(f"--gpus: {self.gpus} does not divide {preset.name}'s batch of "
                         f"{preset.batch}")  # fmt: skip
        if self.gpus % self.nodes:
            found.append(f"--nodes: {self.nodes} does not divide --gpus {self.gpus}, the processes "
                         "on all nodes")  # fmt: skip
        return found

    def command(self, backbone: str, script: str, flags: Mapping[str, Any], out: Path | None = None) -> Command:
        """The script under the backbone's own launcher, in its folder; ADM writes to `out`."""
        home = self.third_party / UPSTREAM[backbone]
        env = {"PYTHONPATH": python_path(home)}
        if self.threads:
            env["OMP_NUM_THREADS"] = str(self.threads)
        if backbone == "adm":
            env["OPENAI_LOGDIR"] = str(out)
        launcher = self.launcher(backbone)
        return Command(launcher, script, flags, str(home), env, joined=backbone == "edm")

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    def launcher(self, backbone: str) -> tuple[str, ...]:
        """What starts the processes: mpiexec, torchrun, or for LDM python, which starts the others.

        Inside a job of Slurm on several nodes srun starts the last two on each of them. Elsewhere
        people do, and mpiexec finds its hosts in HYDRA_HOST_FILE.
        """
        several, nodes = self.nodes > 1, slurm_nodes() if self.nodes > 1 else []
        if backbone == "adm":
            hosts = ("-launcher", "slurm", "-hosts", ",".join(nodes)) if nodes else ()
            spread = (*hosts, "-ppn", str(self.per_node)) if several else ()
            return (beside("mpiexec"), "-n", str(self.gpus), *spread, sys.executable)
        tasks = 1 if backbone == "edm" else self.per_node
        srun = ("srun", "--overlap", f"--nodes={self.nodes}", f"--ntasks-per-node={tasks}")
        srun = srun if nodes else ()
        if backbone == "ldm":
            return (*srun, sys.executable)
        if not several:
            return (beside("torchrun"), "--standalone", f"--nproc_per_node={self.gpus}")
        meet = self.rendezvous or f"{address(nodes[0]) if nodes else 'FIRST_NODE'}:29400"
        return (*srun, beside("torchrun"), f"--nnodes={self.nodes}",
                f"--nproc_per_node={self.per_node}", "--rdzv_backend=c10d",
                f"--rdzv_endpoint={meet}", "--rdzv_id=ogdm")  # fmt: skip


def python_path(*first: Path) -> str:
    """PYTHONPATH with these folders, this repository, and then the user's own."""
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(map(os.path.abspath, (*first, ROOT, *own))))


def absolute(path: str) -> str:
    """The path as it holds in any folder; an URL, or nothing, stays as it is."""
    url = path.startswith(("http://", "https://"))
    return path if url or not path else str(Path(path).absolute())


def beside(name: str) -> str:
    """A program of this very environment, wherever PATH leads."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else name


def slurm_nodes() -> list[str]:
    """The nodes of the Slurm job around us; empty outside of one."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return []
    # SLURM_JOB_NODELIST is not among the variables that Snakemake's plugin hands down.
    ask = ["squeue", "--noheader", f"--jobs={job}", "--format=%N"]
    nodes = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    ask = ["scontrol", "show", "hostnames", *nodes]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()


def address(node: str) -> str:
    """Where other nodes reach a node of Slurm's; mostly its name."""
    ask = ["sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%o"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]


# ---- training -----------------------------------------------------------------------------------


def train(
    preset: Preset, data: str, out: Path, init: str = "", seed: int | None = None,
    engine: Engine | None = None, more: Mapping[str, Any] | None = None,
) -> Command:  # fmt: skip
    """Trains a row of Table 5 into the folder `out`; flags in `more` replace its own."""
    engine = engine or Engine()
    if problems := engine.check(preset):
        raise ValueError(problems[0])
    make = {"adm": _train_adm, "edm": _train_edm, "ldm": _train_ldm}[preset.backbone]
    flags = make(preset, engine, data, out, init, seed) | dict(more or {})
    return engine.command(preset.backbone, SCRIPT[preset.backbone], flags, out)


def ogdm_flags(backbone: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the method, {"k": 0.2}, in the backbone's own spelling."""
    spell = {"adm": "--ogdm_{}".format, "edm": lambda n: f"--ogdm-{n.replace('_', '-')}",
             "ldm": "model.params.ogdm.{}".format}[backbone]  # fmt: skip
    return {spell(name): str(value) for name, value in settings.items()}


def _ogdm(preset: Preset) -> dict[str, Any]:
    """What Table 5 says of the method. The rest are defaults, which a recipe may change."""
    if not preset.ogdm:
        return {}
    target = {"model.target": "ogdm_core.ldm.train.OGDMLatentDiffusion"}
    on = target if preset.backbone == "ldm" else {"--ogdm": "True"}
    said = {"projection": preset.projection, "k": preset.k, "gamma": preset.gamma}
    return on | ogdm_flags(preset.backbone, said)


ADM_MODEL = {
    "--num_channels": 128, "--num_res_blocks": 3, "--attention_resolutions": "16,8",
    "--num_heads": 1, "--use_scale_shift_norm": True, "--learn_sigma": False,
    "--diffusion_steps": 1000, "--noise_schedule": "linear",
}  # fmt: skip


def adm_model(preset: Preset) -> dict[str, Any]:
    """The network and the diffusion of a row, in guided-diffusion's flags."""
    size, dropout = {"cifar10": (32, 0.1), "celeba64": (64, 0.0)}[preset.dataset]
    return {"--class_cond": preset.conditional, "--image_size": size, **ADM_MODEL,
            "--dropout": dropout}  # fmt: skip


def _train_adm(preset: Preset, engine: Engine, data, out, init, seed) -> dict[str, Any]:
    """Upstream ends a run by --lr_anneal_steps only, so the learning rate falls linearly to zero;
    its trainer has no seed."""
    if preset.training == "finetune" and not init:
        raise ValueError(f"{preset.name} fine-tunes: give the baseline's EMA weights with --init "
                         "ema_0.9999_NNNNNN.pt")  # fmt: skip
    return {
        "--data_dir": data, **adm_model(preset), "--schedule_sampler": "uniform", "--lr": "1e-4",
        "--ema_rate": "0.9999", "--batch_size": preset.batch // engine.gpus,
        "--lr_anneal_steps": preset.steps, **({"--init_checkpoint": init} if init else {}),
        **_ogdm(preset),
    }  # fmt: skip


EDM_PRETRAINED = "https://nvlabs-fi-cdn.nvidia.com/edm/pretrained/edm-cifar10-32x32-{}-vp.pkl"
EDM_DUMPS = 20  # checkpoints per training; upstream's, every 25M images, come too seldom to resume


def _train_edm(preset: Preset, engine: Engine, data, out, init, seed) -> dict[str, Any]:
    """A fine-tune starts from the released model unless others are given, at the full rate."""
    ticks = round(preset.images / 50_000 / EDM_DUMPS)
    flags = {
        "--outdir": out, "--nosubdir": None, "--data": data, "--cond": int(preset.conditional),
        "--arch": "ddpmpp", "--precond": "edm", "--batch": preset.batch,
        "--duration": f"{preset.images / 1e6:g}", "--lr": 1e-3, "--ema": 0.5, "--dropout": 0.13,
        "--augment": 0.12, "--snap": ticks, "--dump": ticks,
    }  # fmt: skip
    if seed is not None:
        flags["--seed"] = seed
    if preset.training == "finetune":
        released = EDM_PRETRAINED.format("cond" if preset.conditional else "uncond")
        flags |= {"--transfer": init or released, "--lr-rampup": 0}
    return flags | _ogdm(preset)


LDM_BASE = "configs/latent-diffusion/lsun_churches-ldm-kl-8.yaml"
LDM_FINETUNE = Path(__file__).with_name("lsun_churches_finetune.yaml")


def _train_ldm(preset: Preset, engine: Engine, data, out, init, seed) -> dict[str, Any]:
    """The row is on upstream's dotlist; the YAML holds what Table 5 does not say.

    A fine-tune starts from the released model, where upstream's script puts it, unless others are
    given. `data` is for data sets that say where they are; LSUN is where upstream looks.
    """
    base = (LDM_BASE, *([str(LDM_FINETUNE)] if preset.training == "finetune" else []))
    flags = {
        "--base": base, "-t": True, "--gpus": "".join(f"{i}," for i in range(engine.per_node)),
        **({"--num_nodes": engine.nodes} if engine.nodes > 1 else {}),
        "--scale_lr": False, "-l": f"{out}/runs", **({} if seed is None else {"-s": seed}),
        "data.params.batch_size": preset.batch // engine.gpus,
        "lightning.trainer.max_steps": preset.steps,
        **({"model.params.ckpt_path": init} if init else {}),
    }  # fmt: skip
    return flags | _ogdm(preset)


# ---- resuming -----------------------------------------------------------------------------------

# The file that a checkpoint's writing ends with, and the weights that a finished training leaves.
CHECKPOINT = {"adm": "opt*.pt", "edm": "training-state-*.pt",
              "ldm": "runs/*/checkpoints/last*.ckpt"}  # fmt: skip
SEAL = {"adm": "ogdm*.pt", "edm": "ogdm-state-*.pt"}  # with --ogdm
WEIGHTS = {"adm": "ema_*.pt", "edm": "network-snapshot-*.pkl", "ldm": CHECKPOINT["ldm"]}


def resumed(command: Command, backbone: str, folder: Path) -> Command | None:
    """`command` from the last checkpoint in its folder by native means; None if it is finished.

    Upstream's EDM, resumed after its end, would train one batch more and replace the final model.
    """
    observed = any(name.startswith("--ogdm") for name in command.flags)
    pattern = SEAL.get(backbone) if observed else None
    last = newest(folder, pattern or CHECKPOINT[backbone], whole=True)
    if last is None:
        return command
    flags = dict(command.flags)
    if backbone == "adm":
        flags["--resume_checkpoint"] = last.with_name(re.sub("opt|ogdm", "model", last.name))
    elif backbone == "edm":
        if int(re.findall(r"\d+", last.name)[-1]) >= int(1000 * float(flags["--duration"])):
            return None
        flags.pop("--transfer", None)
        flags["--resume"] = last.with_name(last.name.replace("ogdm-", "training-"))
    else:  # the run's saved config has the rest, but how the batch was split then
        kept = ("-t", "--gpus", "--num_nodes", "--scale_lr", "-s", "data.params.batch_size",
                "lightning.trainer.max_steps")  # fmt: skip
        flags = {"-r": last} | {name: flags[name] for name in kept if name in flags}
    return replace(command, flags=flags)


def steps_left(command: Command, backbone: str, folder: Path) -> int:
    """Steps that a training has not done though it ended well, as Lightning does on SIGTERM."""
    last = newest(folder, CHECKPOINT["ldm"], whole=True) if backbone == "ldm" else None
    if last is None:
        return 0
    import torch

    done = torch.load(last, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    return int(command.flags["lightning.trainer.max_steps"]) - done


def newest(folder: Path, pattern: str, whole: bool = False) -> Path | None:
    """The latest file that matches; with `whole`, one that torch has written to its end."""
    there = [p for p in folder.glob(pattern) if p.is_file()]
    found = [p for p in there if not whole or zipfile.is_zipfile(p)]
    return max(found, key=lambda p: (p.stat().st_mtime_ns, p.name), default=None)


# ---- sampling -----------------------------------------------------------------------------------


def sample(
    preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int = 50_000,
    seed: int = 0, engine: Engine | None = None, more: Mapping[str, Any] | None = None,
) -> Command:  # fmt: skip
    """Samples a row's weights as Table 6 does, into the folder `out`. LDM runs in one process."""
    engine = engine or Engine()
    discretisation = DISCRETISATION[preset.dataset, preset.backbone].get(sampler, "linear")
    if preset.backbone == "adm":
        script = "scripts/image_sample.py"
        flags = {"--model_path": model, **adm_model(preset), "--num_samples": images,
                 "--batch_size": 250, "--seed": seed, "--sampler": sampler, "--nfe": nfe,
                 "--discretization": discretisation}  # fmt: skip
    elif preset.backbone == "edm":  # it has one discretisation, and one seed per image
        script = "generate.py"
        seeds = f"{seed * images}-{(seed + 1) * images - 1}"
        flags = {"--network": model, "--outdir": f"{out}/images", "--subdirs": None,
                 "--seeds": seeds, "--sampler": sampler, "--nfe": nfe, "--batch": 250,
                 "--npz": f"{out}/samples.npz"}  # fmt: skip
    else:
        script, engine = "scripts/sample_diffusion.py", replace(engine, gpus=1, nodes=1)
        flags = {"-r": model, "-n": images, "--batch_size": 100, "--seed": seed,
                 "--sampler": sampler, "--nfe": nfe, "--discretization": discretisation,
                 "-l": f"{out}/images", "--npz": f"{out}/samples.npz"}  # fmt: skip
    return engine.command(preset.backbone, script, flags | dict(more or {}), out)


def not_ready(backbone: str, third_party: Path) -> str:
    """Why the backbone's code cannot be used, and what to do; empty if it can."""
    name, script = UPSTREAM[backbone], third_party / UPSTREAM[backbone] / SCRIPT[backbone]
    if not script.is_file():
        return f"{backbone}: there is no {script}; run/setup.sh {name} fetches it"
    if "ogdm_core" not in script.read_text():
        return f"{backbone}: {third_party / name} is not patched; run/setup.sh {name} does that"
    return ""
