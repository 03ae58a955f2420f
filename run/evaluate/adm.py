"""guided-diffusion's own evaluator, untouched, in an environment of its own.

Upstream looks for the Inception graph in the folder that it is started in, and downloads it there
if it is absent. So it is started in a folder with a link to the user's file, or in one that keeps
the download.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ogdm_core.files import sha256
from ogdm_core.lock import exclusive
from run.provenance import ROOT

from .sources import Source

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "adm_requirements.txt"
EVALUATOR = ROOT / "third_party" / "guided-diffusion" / "evaluations" / "evaluator.py"
ENVIRONMENT = ROOT / ".setup" / "adm-evaluator"
DOWNLOADS = ROOT / ".setup" / "adm-inception"
GRAPH = "classify_image_graph_def.pb"
URL = f"https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/{GRAPH}"
LINES = {"FID": "fid", "sFID": "sfid", "Precision": "precision", "Recall": "recall",
         "Inception Score": "inception_score"}  # fmt: skip


def check(reference: Source, samples: Source, args: argparse.Namespace) -> None:
    """Raises ValueError for what can be known before anything is installed or computed."""
    check_files(args.weights)
    for source in (reference, samples):
        if not source.count:
            raise ValueError(
                f"{source.path} holds statistics only; ADM's evaluator wants images (arr_0), too. "
                "--evaluator torch takes statistics."
            )


def check_files(weights: Path | None) -> None:
    """Raises ValueError where a file is missing that cannot be fetched here."""
    if weights and not weights.is_file():
        raise ValueError(
            f"--weights {weights}: no such file. ADM's evaluator reads {GRAPH}; leave the flag out to let it "
            f"download the file, or get it from\n  {URL}"
        )
    if not EVALUATOR.is_file():
        raise ValueError("guided-diffusion is not here; run/setup.sh guided-diffusion fetches it")


def evaluate(reference: Source, samples: Source, args: argparse.Namespace) -> dict[str, Any]:
    """The keys of our own evaluator, upstream's sFID and Inception score, its packages' versions."""
    python = ensure_environment()
    with tempfile.TemporaryDirectory(prefix="ogdm-adm-") as scratch:
        sources = {"reference": reference, "samples": samples}
        files = [_as_npz(source, Path(scratch) / f"{name}.npz") for name, source in sources.items()]
        folder = Path(scratch) if args.weights else DOWNLOADS
        folder.mkdir(parents=True, exist_ok=True)
        if args.weights:
            (folder / GRAPH).symlink_to(args.weights.resolve())
        numbers = parse(run(python, files, folder))
    notes = ["precision and recall are over all images of both files"]
    if reference.statistics:
        notes.append(f"FID uses the statistics that {reference.path.name} brings, not its images'")
    return numbers | {
        "reference_images": reference.count,
        "sample_images": samples.count,
        "precision_recall_images": (reference.count, samples.count),
        "features": "inception, TensorFlow's graph",
        "notes": notes,
    }


def key(args: argparse.Namespace) -> list[str]:
    """Changes when the features may."""
    return [sha256(args.weights)] if args.weights else []


def run(python: Path, files: list[Path], folder: Path) -> list[str]:
    """The lines that upstream prints, which go to stderr as they come."""
    command = [str(word) for word in (python, HERE / "adm_runner.py", EVALUATOR, *files)]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    lines = []
    with subprocess.Popen(
        command, cwd=folder, env=environment | {"PYTHONUNBUFFERED": "1"}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode:
        raise OSError(
            f"ADM's evaluator stopped with code {process.returncode}; its output is above. If it could not download "
            f"Inception's graph, get it from\n  {URL}\nand give --weights FILE"
        )
    return lines


def parse(lines: list[str]) -> dict[str, Any]:
    """The numbers in upstream's `Name: number` lines, and the versions in `name version: X`."""
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    if not set(LINES) <= set(found):
        raise OSError(f"ADM's evaluator did not print {', '.join(LINES)}; it ended with {lines[-1:]}")
    numbers = {name: float(found[line]) for line, name in LINES.items()}
    end = " version"
    return numbers | {"versions": {name.removesuffix(end): v for name, v in found.items() if name.endswith(end)}}


def ensure_environment() -> Path:
    """A Python with TensorFlow: OGDM_ADM_PYTHON as it is, else .setup/adm-evaluator, made once."""
    if given := os.environ.get("OGDM_ADM_PYTHON"):
        if not (found := shutil.which(given)):
            raise OSError(f"OGDM_ADM_PYTHON={given} is not a program that can be run")
        return Path(found).absolute()
    python = ENVIRONMENT / "bin" / "python"
    ENVIRONMENT.mkdir(parents=True, exist_ok=True)
    with exclusive(ENVIRONMENT.with_suffix(".lock"), f"making {ENVIRONMENT}"):
        if not ready().exists():
            print(f"Making {ENVIRONMENT} with TensorFlow, 1.7 GB, minutes ...", file=sys.stderr)
            try:
                subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
                install = [python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS]
                subprocess.run(install, check=True, stdout=sys.stderr)
            except subprocess.CalledProcessError as error:
                raise OSError(
                    f"making the environment failed ({error}). Run the same command again, or point OGDM_ADM_PYTHON "
                    "at a Python with TensorFlow, scipy, requests and tqdm."
                ) from error
            ready().touch()
    return python


def ready() -> Path:
    """A file that is there when the environment holds what REQUIREMENTS asks for."""
    return ENVIRONMENT / f"ready-{sha256(REQUIREMENTS)[:16]}"


def _as_npz(source: Source, file: Path) -> Path:
    """The source itself if upstream can read it, else its images written to `file`, as RGB."""
    images = source.images
    if source.path.suffix == ".npz" and images.channels == 3:
        return source.path.resolve()
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), *images.shape[1:], 3)}
    with zipfile.ZipFile(file, "w") as archive, archive.open("arr_0.npy", "w", force_zip64=True) as out:
        np.lib.format.write_array_header_1_0(out, header)
        for index in torch.arange(len(images)).split(256):
            pixels = images.pixels(index).expand(-1, 3, -1, -1)
            out.write(pixels.permute(0, 2, 3, 1).contiguous().numpy().data)
    return file
