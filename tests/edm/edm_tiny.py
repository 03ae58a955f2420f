"""EDM small enough for a test: digits in upstream's dataset format, tiny networks, short runs."""

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]

# The smallest network of upstream's, and an observer to match.
TINY = ["--cbase=8", "--cres=1", "--nosubdir", "--workers=1", "--tick=1", "--snap=1", "--dump=1"]
OGDM = ["--ogdm", "--ogdm-d-width=0.02", "--ogdm-plain-end=0", "--lr-rampup=0"]  # a part of a run ends observed


def digits(path: Path, size: int = 8, count: int = 200) -> Path:
    """Real handwritten digits with their labels, as upstream's dataset_tool.py would write them."""
    data = load_digits()
    labels = []
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(count):
            pixels = (data.images[i] / 16 * 255).round().astype(np.uint8)
            image = PIL.Image.fromarray(pixels).resize((size, size), PIL.Image.Resampling.BILINEAR)
            png = io.BytesIO()
            image.save(png, "png")
            archive.writestr(f"{i:05d}.png", png.getvalue())
            labels.append([f"{i:05d}.png", int(data.target[i])])
        archive.writestr("dataset.json", json.dumps({"labels": labels}))
    return path


def run(script: Path, *args, ranks: int | None = None, shims: bool = False) -> str:
    """Runs a script as a user would, by `torchrun` if `ranks` is given; returns what it printed.

    `shims` runs a script of an untouched clone, which knows nothing of a CPU, through
    ogdm_core.edm.compat.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    line = [sys.executable, *(launcher if ranks else [])]
    line += [*(["-m", "ogdm_core.edm.compat"] if shims else []), script, *args]
    alone = {} if ranks else {"MASTER_PORT": "0"}
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | alone
    done = subprocess.run(
        [str(part) for part in line], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def stats(folder: Path) -> list[dict[str, float]]:
    """The means in stats.jsonl that a run repeats exactly: losses and counts, not timings."""
    lines = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    return [
        {name: value["mean"] for name, value in line.items() if name.startswith(("Loss/", "OGDM/", "Progress/"))}
        for line in lines
    ]


def flatten(value, name: str = "") -> dict:
    """Nested dicts and lists as one flat dict."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in pairs for k, v in flatten(item, f"{name}/{key}").items()}
    return {name: value}


def state(folder: Path, kimg: int) -> dict:
    """Network, optimiser, EMA and, if any, observer of a run after `kimg` thousand images.

    Needs a clone of upstream on sys.path.
    """
    found = torch.load(folder / f"training-state-{kimg:06d}.pt", weights_only=False)
    snapshot = folder / f"network-snapshot-{kimg:06d}.pkl"
    if snapshot.is_file():
        found["ema"] = pickle.loads(snapshot.read_bytes())["ema"]
    observer = folder / f"ogdm-state-{kimg:06d}.pt"
    if observer.is_file():
        found["ogdm"] = torch.load(observer, weights_only=True)
        del found["ogdm"]["files"]  # sizes on disk, which a pickle's own economy may change
    return flatten(found)
