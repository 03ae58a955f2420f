"""Rows of Table 5 on CompVis/latent-diffusion as command lines."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from ogdm_core.samplers import SAMPLERS
from ogdm_core.splice.export import export
from run.provenance import ROOT

from .presets import DISCRETISATION, PRESETS, Preset, get_preset

CONFIGS = Path(__file__).parent
# ---- the paper's rows as command lines --------------------------------------------------------

BASE = "configs/latent-diffusion/lsun_churches-ldm-kl-8.yaml"


def train_argv(preset: Preset, gpus: int = 1, init_checkpoint: str = "") -> list[str]:
    """The full command line that trains one row of Table 5, for upstream's folder."""
    if preset.batch % gpus:
        raise ValueError(f"--gpus: {gpus} does not divide the batch of {preset.batch}")
    name = "lsun_churches_ogdm_ft.yaml" if preset.ogdm else "lsun_churches_baseline.yaml"
    argv = [sys.executable, "main.py", "--base", BASE, str(CONFIGS / name), "-t", "True"]
    argv += ["--gpus", "".join(f"{i}," for i in range(gpus)), "--scale_lr", "False"]
    argv += [f"data.params.batch_size={preset.batch // gpus}"]
    if init_checkpoint:
        argv += [f"model.params.ckpt_path={init_checkpoint}"]
    return argv


def sample_argv(preset: Preset, model_path: str, sampler: str, nfe: int) -> list[str]:
    """The full command line that samples one row's model as Table 6 does; 50,000 images."""
    discretisation = DISCRETISATION[preset.dataset, preset.backbone].get(sampler, "linear")
    argv = [sys.executable, "scripts/sample_diffusion.py", "-r", model_path, "-n", "50000"]
    argv += ["--batch_size", "100", "--sampler", sampler, "--nfe", str(nfe)]
    return argv + ["--discretization", discretisation]


def main(argv: list[str] | None = None) -> int:
    """Exports a checkpoint, or prints a preset's full command line and runs it."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["export"]:
        return _export(argv[1:])
    names = [p.name for p in PRESETS.values() if p.backbone == "ldm"]
    parser = argparse.ArgumentParser(
        prog="python -m run.train.ldm",
        description="Trains a row of the paper's Table 5 with latent-diffusion, or samples from it "
        "(--sample). Arguments that are not listed here go to upstream's script as they are, after "
        "the preset's, so they win. `export CKPT DIR` instead of PRESET writes a trained model for "
        "untouched upstream code.",
        epilog=f"presets: {', '.join(names)}",
    )
    parser.add_argument("preset", metavar="PRESET")
    parser.add_argument("--init_checkpoint", default="",
                        help="weights to fine-tune (default: the released model, where upstream's "
                             "download script puts it)")  # fmt: skip
    parser.add_argument("--sample", default="", choices=list(SAMPLERS), help="sample instead")
    parser.add_argument("--model_path", default="", help="with --sample: the .ckpt to sample from")
    parser.add_argument("--nfe", type=int, default=10, help="with --sample (default: 10)")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--upstream", default=str(ROOT / "third_party" / "latent-diffusion"),
                        help="the patched codebase (default: %(default)s)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    args, native = parser.parse_known_args(argv)
    try:
        command = _command(args) + native
    except ValueError as error:
        parser.error(str(error))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    assignment = f"PYTHONPATH={shlex.quote(env['PYTHONPATH'])}"
    print(f"cd {shlex.quote(args.upstream)} && {assignment} {shlex.join(command)}", flush=True)
    if args.dry_run:
        return 0
    return subprocess.run(command, cwd=args.upstream, env=os.environ | env).returncode


def _command(args: argparse.Namespace) -> list[str]:
    """The preset's own part of the command line, with paths that hold in any folder."""
    preset = get_preset(args.preset, "ldm")
    if args.gpus < 1:
        raise ValueError("--gpus: give at least 1")
    if args.sample:
        if not args.model_path:
            raise ValueError("--sample needs --model_path, a .ckpt written by training")
        return sample_argv(preset, os.path.abspath(args.model_path), args.sample, args.nfe)
    init = os.path.abspath(args.init_checkpoint) if args.init_checkpoint else ""
    return train_argv(preset, args.gpus, init)


def _export(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m run.train.ldm export")
    parser.add_argument("checkpoint", metavar="CKPT", help="as in RUN/checkpoints/last.ckpt")
    parser.add_argument("folder", metavar="DIR", help="gets model.ckpt and config.yaml")
    args: Any = parser.parse_args(argv)
    export(args.checkpoint, args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
