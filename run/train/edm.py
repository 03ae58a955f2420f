"""Rows of Table 5 on NVlabs/edm as command lines."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from ogdm_core.config import OGDMConfig
from run.provenance import ROOT

from .presets import PRESETS, Preset, get_preset

PRETRAINED = "https://nvlabs-fi-cdn.nvidia.com/edm/pretrained/edm-cifar10-32x32-{}-vp.pkl"

# ---- presets ------------------------------------------------------------------------------------


def command(
    preset: Preset, data: str, gpus: int, outdir: str, edm: Path, extra: list[str] | None = None
) -> list[str]:
    """The full torchrun command line of one row of Table 5; a flag in `extra` replaces its own."""
    flags = {
        "outdir": outdir, "data": data, "cond": int(preset.conditional), "arch": "ddpmpp",
        "precond": "edm", "batch": preset.batch, "duration": f"{preset.images / 1e6:g}",
        "lr": 1e-3, "ema": 0.5, "dropout": 0.13, "augment": 0.12,
    }  # fmt: skip
    if preset.training == "finetune":
        flags["transfer"] = PRETRAINED.format("cond" if preset.conditional else "uncond")
        flags["lr-rampup"] = 0
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += _ogdm_flags(preset) if preset.ogdm else []
    extra = extra or []
    replaced = {word.split("=")[0] for word in extra}
    words = [word for word in words if word.split("=")[0] not in replaced]
    torchrun = ["torchrun", "--standalone", f"--nproc_per_node={gpus}"]
    return [*torchrun, str(edm / "train.py"), *words, *extra]


def _ogdm_flags(preset: Preset) -> list[str]:
    """Every setting spelt out, so that the printed line means the same tomorrow."""
    config = OGDMConfig(projection=preset.projection, k=preset.k, gamma=preset.gamma)
    argv = ["--ogdm"]
    for f in fields(config):
        flag, value = f"--ogdm-{f.name.replace('_', '-')}", getattr(config, f.name)
        if isinstance(value, bool):
            argv += [flag] if value else []
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            argv.append(f"{flag}={text}")
    return argv


def main(argv: list[str] | None = None) -> int:
    """Prints a preset's command line, then runs it unless --dry-run is given."""
    names = [name for name, preset in PRESETS.items() if preset.backbone == "edm"]
    parser = argparse.ArgumentParser(
        prog="python -m run.train.edm",
        description="Train as in the paper's Table 5. Further arguments go to train.py as they "
        "are, and replace the preset's.",
        epilog="presets: " + ", ".join(names),
    )
    parser.add_argument("preset", metavar="PRESET", help="a row of Table 5, see below")
    parser.add_argument("--data", required=True, metavar="ZIP|DIR", help="in EDM's dataset format")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--outdir", default="out/edm", metavar="DIR", help="default: out/edm")
    parser.add_argument("--edm", type=Path, default=ROOT / "third_party" / "edm", metavar="DIR",
                        help="patched clone of NVlabs/edm (default: third_party/edm)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command line, no more")
    args, extra = parser.parse_known_args(argv)
    try:
        preset = get_preset(args.preset, backbone="edm")
    except ValueError as error:
        parser.error(str(error))
    line = command(preset, args.data, args.gpus, args.outdir, args.edm, extra)
    print(shlex.join(line), flush=True)
    if args.dry_run:
        return 0
    script = args.edm / "train.py"
    if not script.is_file() or "ogdm_core" not in script.read_text():
        parser.error(f"{args.edm} is not a patched clone of NVlabs/edm; run/setup.sh edm makes one")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = [sys.executable, "-m", "torch.distributed.run"]  # torchrun, of this very Python
    return subprocess.run(launcher + line[1:], env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
