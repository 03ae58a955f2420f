"""Rows of Table 5 on openai/guided-diffusion as command lines."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from ogdm_core.samplers import SAMPLERS
from run.provenance import ROOT

from .presets import DISCRETISATION, PRESETS, Preset, get_preset

# ---- the paper's rows as command lines --------------------------------------------------------

MODEL = {
    "cifar10": "--image_size 32 --num_channels 128 --num_res_blocks 3 "
    "--attention_resolutions 16,8 --dropout 0.1 --use_scale_shift_norm True --learn_sigma False",
    "celeba64": "--image_size 64 --num_channels 128 --num_res_blocks 3 "
    "--attention_resolutions 16,8 --dropout 0.0 --use_scale_shift_norm True --learn_sigma False",
}
DIFFUSION = "--diffusion_steps 1000 --noise_schedule linear"
TRAIN = "--lr 1e-4 --ema_rate 0.9999 --schedule_sampler uniform"


def _mpiexec(script: str, ranks: int) -> list[str]:
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else "mpiexec"
    return [mpiexec, "-n", str(ranks), sys.executable, f"scripts/{script}"]


def train_argv(
    preset: Preset, data_dir: str, ranks: int = 1, init_checkpoint: str = ""
) -> list[str]:
    """The full command line that trains one row of Table 5.

    Upstream ends a run only by --lr_anneal_steps, so the learning rate falls linearly to zero.
    """
    if preset.batch % ranks:
        raise ValueError(f"--gpus: {ranks} does not divide the batch of {preset.batch}")
    argv = _mpiexec("image_train.py", ranks)
    argv += ["--data_dir", data_dir, "--class_cond", str(preset.conditional)]
    argv += shlex.split(f"{MODEL[preset.dataset]} {DIFFUSION} {TRAIN}")
    argv += ["--batch_size", str(preset.batch // ranks), "--lr_anneal_steps", str(preset.steps)]
    if preset.training == "finetune" and not init_checkpoint:
        raise ValueError(
            f"{preset.name} fine-tunes: give the baseline's EMA with --init_checkpoint "
            "ema_0.9999_NNNNNN.pt"
        )
    if init_checkpoint:
        argv += ["--init_checkpoint", init_checkpoint]
    if preset.ogdm:
        argv += ["--ogdm", "True", "--ogdm_projection", preset.projection]
        argv += ["--ogdm_k", f"{preset.k:g}", "--ogdm_gamma", f"{preset.gamma:g}"]
    return argv


def sample_argv(
    preset: Preset, model_path: str, sampler: str, nfe: int, ranks: int = 1
) -> list[str]:
    """The full command line that samples one row's model as Table 6 does; 50,000 images."""
    discretisation = DISCRETISATION[preset.dataset, preset.backbone].get(sampler, "linear")
    argv = _mpiexec("image_sample.py", ranks)
    argv += ["--model_path", model_path, "--class_cond", str(preset.conditional)]
    argv += shlex.split(f"{MODEL[preset.dataset]} {DIFFUSION}")
    argv += ["--num_samples", "50000", "--batch_size", "250", "--seed", "0"]
    argv += ["--sampler", sampler, "--nfe", str(nfe), "--discretization", discretisation]
    return argv


def main(argv: list[str] | None = None) -> int:
    """Prints a preset's full command line, and runs it."""
    names = [p.name for p in PRESETS.values() if p.backbone == "adm"]
    parser = argparse.ArgumentParser(
        prog="python -m run.train.adm",
        description="Trains a row of the paper's Table 5 with guided-diffusion, or samples from "
        "it (--sample). Arguments that are not listed here go to upstream's script as they are, "
        "after the preset's, so they win.",
        epilog=f"presets: {', '.join(names)}",
    )
    parser.add_argument("preset", metavar="PRESET")
    parser.add_argument("--data_dir", default="", help="folder of images (run/prepare_data.sh)")
    parser.add_argument("--init_checkpoint", default="", help="weights to fine-tune, a .pt")
    parser.add_argument("--sample", default="", choices=list(SAMPLERS), help="sample instead")
    parser.add_argument("--model_path", default="", help="with --sample: the .pt to sample from")
    parser.add_argument("--nfe", type=int, default=10, help="with --sample (default: 10)")
    parser.add_argument("--gpus", type=int, default=1, help="ranks, one a GPU (default: 1)")
    parser.add_argument("--logdir", default="", help="where results go (OPENAI_LOGDIR)")
    parser.add_argument("--upstream", default=str(ROOT / "third_party" / "guided-diffusion"),
                        help="the patched codebase (default: %(default)s)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    args, native = parser.parse_known_args(argv)
    try:
        command = _command(args) + native
    except ValueError as error:
        parser.error(str(error))
    paths = [args.upstream, str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if args.logdir:
        env["OPENAI_LOGDIR"] = os.path.abspath(args.logdir)
    assignments = " ".join(f"{k}={shlex.quote(v)}" for k, v in env.items())
    print(f"cd {shlex.quote(args.upstream)} && {assignments} {shlex.join(command)}", flush=True)
    if args.dry_run:
        return 0
    return subprocess.run(command, cwd=args.upstream, env=os.environ | env).returncode


def _command(args: argparse.Namespace) -> list[str]:
    """The preset's own part of the command line, with paths that hold in any folder."""
    preset = get_preset(args.preset, "adm")
    if args.gpus < 1:
        raise ValueError("--gpus: give at least 1")
    if args.sample:
        if not args.model_path:
            raise ValueError("--sample needs --model_path, a .pt written by training")
        path = os.path.abspath(args.model_path)
        return sample_argv(preset, path, args.sample, args.nfe, args.gpus)
    if not args.data_dir:
        raise ValueError("--data_dir: give the folder of images (run/prepare_data.sh makes it)")
    init = os.path.abspath(args.init_checkpoint) if args.init_checkpoint else ""
    return train_argv(preset, os.path.abspath(args.data_dir), args.gpus, init)


if __name__ == "__main__":
    sys.exit(main())
