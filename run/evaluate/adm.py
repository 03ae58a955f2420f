"""guided-diffusion's own evaluator, untouched, in an environment of its own.

Upstream looks for the Inception graph in the folder that it is started in, and downloads it there
if it is absent. So it is started in a folder with a link to the user's file, or in one that keeps
the download.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from .lock import alone
from .sources import Npz, Source

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "adm_requirements.txt"
EVALUATOR = ROOT / "third_party" / "guided-diffusion" / "evaluations" / "evaluator.py"
ENVIRONMENT = ROOT / ".setup" / "adm-evaluator"
DOWNLOADS = ROOT / ".setup" / "adm-inception"
GRAPH = "classify_image_graph_def.pb"
URL = f"https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/{GRAPH}"
LINES = {"FID": "fid", "sFID": "sfid", "Precision": "precision", "Recall": "recall",
         "Inception Score": "inception_score"}  # fmt: skip


class AdmError(Exception):
    """Upstream's evaluator or its environment failed; says what to do."""


def evaluate(reference: Source, samples: Source, args: argparse.Namespace) -> dict:
    """The same keys as ours, and upstream's Inception score."""
    check(reference, samples, args)
    python = ensure_environment()
    with tempfile.TemporaryDirectory(prefix="ogdm-adm-") as scratch:
        files = [_as_npz(source, Path(scratch) / f"{name}.npz")
                 for name, source in (("reference", reference), ("samples", samples))]  # fmt: skip
        folder = DOWNLOADS
        if args.weights:
            folder = Path(scratch)
            (folder / GRAPH).symlink_to(args.weights.resolve())
        folder.mkdir(parents=True, exist_ok=True)
        numbers, found = run(python, files, folder)
    notes = ["precision and recall are over all images of both files"]
    if reference.statistics:
        notes.append(f"FID uses the statistics that {reference.path.name} brings, not its images'")
    return numbers | {
        "reference_images": reference.count,
        "sample_images": samples.count,
        "precision_recall_images": (reference.count, samples.count),
        "features": "inception, TensorFlow's graph",
        "notes": notes,
        "versions": found,
    }


def check(reference: Source, samples: Source, args: argparse.Namespace) -> None:
    """Raises ValueError for what can be known before anything is installed or computed."""
    if args.features:
        raise ValueError("--features is for --evaluator torch; ADM's knows Inception only")
    if args.weights and not args.weights.is_file():
        raise ValueError(
            f"--weights {args.weights}: no such file. ADM's evaluator reads {GRAPH}; leave the "
            f"flag out to let it download the file, or get it from\n  {URL}"
        )
    for source in (reference, samples):
        if not source.count:
            raise ValueError(
                f"{source.path} holds statistics only; ADM's evaluator wants images (arr_0), too. "
                "--evaluator torch takes statistics."
            )
    if not EVALUATOR.is_file():
        raise ValueError("guided-diffusion is not here; run/setup.sh guided-diffusion fetches it")


def run(python: Path, files: list[Path], folder: Path) -> tuple[dict, dict]:
    """Upstream's numbers and its packages' versions; its words go to stderr as they come."""
    command = [python, HERE / "adm_runner.py", EVALUATOR, *files]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    lines = []
    with subprocess.Popen(
        [str(word) for word in command], cwd=folder, env=environment | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                if not line.startswith("{"):
                    print(line, end="", file=sys.stderr, flush=True)
        except BaseException:  # else leaving would wait for it
            process.kill()
            raise
    if process.returncode:
        raise AdmError(
            f"ADM's evaluator stopped with code {process.returncode}; its words are above. If it "
            f"could not download Inception's graph, get it from\n  {URL}\nand give --weights FILE"
        )
    return parse(lines)


def parse(lines: list[str]) -> tuple[dict, dict]:
    """Upstream prints `Name: number` lines; the runner ends with the versions."""
    numbers = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if name in LINES and re.fullmatch(r"-?[\d.]+(e-?\d+)?|nan|inf", value):
            numbers[LINES[name]] = float(value)
    if set(numbers) != set(LINES.values()):
        raise AdmError(
            f"ADM's evaluator did not print {', '.join(LINES)}; it ended with {lines[-1:]}"
        )
    return numbers, json.loads(lines[-1])["versions"]


def ensure_environment() -> Path:
    """A Python with TensorFlow: OGDM_ADM_PYTHON as it is, else .setup/adm-evaluator, made once."""
    if given := os.environ.get("OGDM_ADM_PYTHON"):
        if not (found := shutil.which(given)):
            raise AdmError(f"OGDM_ADM_PYTHON={given} is not a program that can be run")
        return Path(found).absolute()
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "ogdm-stamp"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    with alone(ENVIRONMENT.with_suffix(".lock"), "making ADM's environment"):
        if python.exists() and stamp.is_file() and stamp.read_text() == wanted:
            return python
        print(f"Making {ENVIRONMENT.relative_to(ROOT)} with TensorFlow for ADM's evaluator, "
              "about 1.7 GB; minutes ...", file=sys.stderr)  # fmt: skip
        stamp.unlink(missing_ok=True)
        base = getattr(sys, "_base_executable", None) or sys.executable
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
        ]
        log = ENVIRONMENT.with_suffix(".log")
        for command in ([base, "-m", "venv", ENVIRONMENT], [*pip, "-r", REQUIREMENTS]):
            with log.open("a") as out:
                code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
            if code:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-6:])
                raise AdmError(
                    f"making the environment failed:\n{tail}\nThe whole log is in "
                    f"{log.relative_to(ROOT)}. Run the same command again to go on, or point "
                    "OGDM_ADM_PYTHON at a Python with TensorFlow, scipy, requests and tqdm."
                )
        stamp.write_text(wanted)
    return python


def _as_npz(source: Source, file: Path) -> Path:
    """The source itself if upstream can read it, else its images written to `file`."""
    if isinstance(source, Npz) and source.channels == 3:
        return source.path.resolve()
    header = {"descr": "|u1", "fortran_order": False, "shape": (source.count, *source.size, 3)}
    with (
        zipfile.ZipFile(file, "w") as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as out,
    ):
        np.lib.format.write_array_header_1_0(out, header)
        for images in source.batches(256):
            out.write(images.tobytes())
    return file
