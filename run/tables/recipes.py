"""How each backbone trains and samples a row: its native commands, as Tables 5 and 6 set them.

A recipe gives command lines only. `ranks` is the number of processes, one a GPU; `folder` is where
the command may write; paths are absolute, since each command runs in its upstream's folder.
"""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from ogdm_core.config import OGDMConfig
from run.provenance import ROOT
from run.train import adm, edm, ldm
from run.train.presets import Preset

from .stages import Command, newest, python_path

SMOKE_CONFIG = Path(__file__).with_name("smoke_ldm.yaml")


@dataclass(frozen=True)
class Recipe:
    """What the recipes share. `smoke`: tiny networks, a few steps, 32x32 images."""

    third_party: Path
    seed: int = 0
    smoke: bool = False
    threads: int = 0  # of each process on a CPU; 0 leaves it to torch

    upstream: ClassVar[str]  # folder in third_party
    script: ClassVar[str]  # a script of it that our patches touch
    packages: ClassVar[tuple[str, ...]]  # which it imports
    trained: ClassVar[tuple[str, str]]  # name of the weights, and where training leaves them
    sampled: ClassVar[tuple[str, str]]  # name of the images, and where sampling leaves them
    scrap: ClassVar[tuple[str, ...]] = ()  # what else sampling leaves
    meter: ClassVar[str]  # regex for the progress that training logs

    @property
    def home(self) -> Path:
        return self.third_party / self.upstream

    def command(self, argv: list[str], **env: str) -> Command:
        """`argv` in upstream's folder, with this repository and the upstream to import from."""
        env["PYTHONPATH"] = python_path(self.home, ROOT)
        if self.threads:
            env["OMP_NUM_THREADS"] = str(self.threads)
        return Command(tuple(argv), self.home, tuple(env.items()))

    def canonical(self, argv: list[str]) -> tuple[str, ...]:
        """The part of a command line that its result depends on: from the script's name on."""
        first = next(i for i, word in enumerate(argv) if word.endswith(".py"))
        return tuple(word.replace(str(ROOT), "ROOT") for word in argv[first:])

    def configs(self, preset: Preset) -> list[str]:
        """Files of settings, whose content the result depends on."""
        return []

    def small(self, preset: Preset) -> Preset:
        """The preset to train: in a smoke run a batch of 8 for three steps."""
        return replace(preset, batch=8, images=24) if self.smoke else preset


class ADM(Recipe):
    """openai/guided-diffusion, by mpiexec."""

    upstream, script = "guided-diffusion", "scripts/image_train.py"
    packages = ("mpi4py", "blobfile")
    trained, sampled = ("model.pt", "ema_*.pt"), ("samples.npz", "samples_*.npz")
    meter = r"\| step +\| ([\d.e+]+)"
    # A rate at which three steps leave a mark, and an EMA that follows.
    FAST: ClassVar = ["--lr", "1e-2", "--ema_rate", "0.5"]
    TINY: ClassVar = ["--image_size", "32", "--num_channels", "32", "--num_res_blocks", "1",
                      "--channel_mult", "1,1", "--attention_resolutions", "16"]  # fmt: skip

    def train_argv(self, preset: Preset, ranks: int, folder: str, data: str, init: str):
        """image_train.py; the folder is OPENAI_LOGDIR's."""
        argv = adm.train_argv(self.small(preset), data, ranks, init)
        if self.smoke:
            argv = override(argv, *self.TINY, "--log_interval", "1", *self.FAST)
            argv += ["--ogdm_d_width", "0.02"] if preset.ogdm else []
        return argv

    def train(self, preset: Preset, ranks: int, folder: Path, data: Path, init: str) -> Command:
        argv = self.train_argv(preset, ranks, str(folder), str(data), init)
        last = newest(folder, "opt*.pt", whole=zipfile.is_zipfile)  # the last file of a checkpoint
        if last is not None:
            argv += ["--resume_checkpoint", str(last.with_name(last.name.replace("opt", "model")))]
        return self.command(argv, OPENAI_LOGDIR=str(folder))

    def sample_argv(self, preset, ranks, folder, model, sampler, nfe, images):
        """image_sample.py, which names its file itself."""
        argv = adm.sample_argv(preset, model, sampler, nfe, ranks)
        tiny = [*self.TINY, "--batch_size", str(images)] if self.smoke else []
        return override(argv, "--num_samples", str(images), "--seed", str(self.seed), *tiny)

    def sample(self, preset, ranks, folder: Path, model: str, sampler, nfe, images) -> Command:
        argv = self.sample_argv(preset, ranks, str(folder), model, sampler, nfe, images)
        return self.command(argv, OPENAI_LOGDIR=str(folder))


class EDM(Recipe):
    """NVlabs/edm, by torchrun."""

    upstream, script = "edm", "train.py"
    packages = ("click", "psutil")
    trained, sampled = ("model.pkl", "network-snapshot-*.pkl"), ("samples.npz", "")
    scrap = ("images",)
    meter = r"kimg ([\d.]+)"
    DUMPS: ClassVar = 20  # checkpoints a training

    def small(self, preset: Preset) -> Preset:
        """In a smoke run a thousand images, the least that upstream counts."""
        return replace(preset, batch=200, images=1000) if self.smoke else preset

    def train_argv(self, preset: Preset, ranks: int, folder: str, data: str, init: str):
        """train.py, straight into the folder."""
        # Upstream's state dumps, every 25 million images, come too seldom to resume a fine-tune.
        ticks = 1 if self.smoke else round(preset.images / 50_000 / self.DUMPS)
        extra = ["--nosubdir", f"--seed={self.seed}", f"--snap={ticks}", f"--dump={ticks}"]
        extra += [f"--transfer={init}"] if init else []
        if self.smoke:
            extra += ["--cbase=8", "--cres=1,1", "--tick=1", "--augment=0"]
            extra += ["--ema=0", "--lr-rampup=0"]
            extra += ["--ogdm-d-width=0.02"] if preset.ogdm else []
        argv = edm.command(self.small(preset), data, ranks, folder, Path("."), extra)
        return [_beside("torchrun"), *argv[1:]]

    def canonical(self, argv: list[str]) -> tuple[str, ...]:
        """Without settings of the method that no row sets: a new one changes no old key."""
        return tuple(word for word in super().canonical(argv) if word not in _defaults())

    def train(self, preset: Preset, ranks: int, folder: Path, data: Path, init: str) -> Command:
        argv = self.train_argv(preset, ranks, str(folder), str(data), init)
        state = newest(folder, "training-state-*.pt", whole=zipfile.is_zipfile)
        if state is not None:
            argv = [word for word in argv if not word.startswith("--transfer=")]
            argv += [f"--resume={state}"]
        return self.command(argv)

    def sample_argv(self, preset, ranks, folder, model, sampler, nfe, images):
        """generate.py; --seed chooses a range of upstream's seeds, one an image."""
        first = self.seed * images
        argv = [_beside("torchrun"), "--standalone", f"--nproc_per_node={ranks}", "generate.py"]
        argv += [f"--network={model}", f"--outdir={folder}/images", "--subdirs"]
        argv += [f"--seeds={first}-{first + images - 1}", f"--sampler={sampler}", f"--nfe={nfe}"]
        return [*argv, "--batch=250", f"--npz={folder}/samples.npz"]

    def sample(self, preset, ranks, folder: Path, model: str, sampler, nfe, images) -> Command:
        argv = self.sample_argv(preset, ranks, str(folder), model, sampler, nfe, images)
        return self.command(argv)


class LDM(Recipe):
    """CompVis/latent-diffusion, by Lightning. Upstream samples in one process."""

    upstream, script = "latent-diffusion", "main.py"
    packages = ("pytorch_lightning", "omegaconf", "einops")
    trained, sampled = ("model.ckpt", "runs/*/checkpoints/last*.ckpt"), ("samples.npz", "")
    scrap = ("images",)
    meter = r"global_step=([\d.]+)"
    FIRST_STAGE: ClassVar = "models/first_stage_models/kl-f8/model.ckpt"

    def configs(self, preset: Preset) -> list[str]:
        name = "lsun_churches_ogdm_ft.yaml" if preset.ogdm else "lsun_churches_baseline.yaml"
        return [str(ldm.CONFIGS / name), *([str(SMOKE_CONFIG)] if self.smoke else [])]

    def train_argv(self, preset: Preset, ranks: int, folder: str, data: str, init: str):
        """main.py, with its run in folder/runs."""
        argv = ldm.train_argv(self.small(preset), ranks, init)
        if self.smoke:
            argv.insert(argv.index("-t"), str(SMOKE_CONFIG))
            argv += [f"data.params.train.params.folder={data}"]
            argv += [f"data.params.validation.params.folder={data}"]
            argv += ["model.params.ogdm.d_width=0.02"] if preset.ogdm else []
            if not init:
                argv += ["model.params.ckpt_path=null"]
        return [*argv, "-l", f"{folder}/runs", "-s", str(self.seed)]

    def train(self, preset: Preset, ranks: int, folder: Path, data: Path, init: str) -> Command:
        argv = self.train_argv(preset, ranks, str(folder), str(data), init)
        last = newest(folder, self.trained[1], whole=zipfile.is_zipfile)
        if last is not None:
            first, gpus = argv.index("main.py"), argv.index("--gpus")
            # The run's saved config has the rest, but the batch of a process as it was then.
            kept = [*argv[gpus : gpus + 5], "-s", str(self.seed)]
            argv = [*argv[: first + 1], "-r", str(last), "-t", "True", *kept]
        return self.command(argv)

    def sample_argv(self, preset, ranks, folder, model, sampler, nfe, images):
        """sample_diffusion.py; it also writes every image as a file, which is scrap."""
        argv = ldm.sample_argv(preset, model, sampler, nfe)
        argv = override(argv, "-n", str(images), "--seed", str(self.seed))
        return [*argv, "-l", f"{folder}/images", "--npz", f"{folder}/samples.npz"]

    def sample(self, preset, ranks, folder: Path, model: str, sampler, nfe, images) -> Command:
        argv = self.sample_argv(preset, ranks, str(folder), model, sampler, nfe, images)
        return self.command(argv)


RECIPES: dict[str, type[Recipe]] = {"adm": ADM, "edm": EDM, "ldm": LDM}


def override(argv: list[str], *more: str) -> list[str]:
    """`argv` with the pairs `--flag value` of `more`: in place of its own, or at the end."""
    argv = list(argv)
    for flag, value in zip(more[::2], more[1::2], strict=True):
        if flag in argv:
            argv[argv.index(flag) + 1] = value
        else:
            argv += [flag, value]
    return argv


def _defaults() -> set[str]:
    """EDM's flags for the settings of the method that no row of Table 5 sets, at their defaults."""
    words = set()
    for f in fields(OGDMConfig):
        if f.name not in ("projection", "k", "gamma"):
            text = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
            words.add(f"--ogdm-{f.name.replace('_', '-')}={text}")
    return words


def _beside(name: str) -> str:
    """A program of this very environment, wherever PATH leads."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else name
