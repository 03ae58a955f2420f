"""What run/quickstart.sh does: trains and scores what is not there yet, prints the table, writes the report."""

import argparse
import hashlib
import json
import resource
import shlex
import signal
import sys
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ogdm_core.files import sha256
from ogdm_core.lock import exclusive
from run.presets import EXPERIMENTS
from run.provenance import commit, versions
from run.quickstart import report, score
from run.quickstart.flags import parse, to_argv, trainer_flags
from run.quickstart.runner import Runner

PACKAGES = ("torch", "diffusers", "accelerate", "numpy", "scikit-learn", "ogdm")


def ensure_baseline(args: argparse.Namespace, runner: Runner) -> Path:
    """The folder of the pretrained baseline: ours, or one trained here."""
    experiment = EXPERIMENTS[args.data]
    if not args.from_scratch:
        return experiment["model"]
    folder, flags = args.out / "baseline", experiment["baseline"]
    words = to_argv({"data": args.data, "output": folder, "log_every": 100, **flags})
    runner.run("baseline", "ogdm_core.diffusers", words, folder / "log.jsonl", flags["steps"])
    return folder


def fingerprint(model: Path) -> str:
    """Hash of a model's weights."""
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} is missing; --from-scratch trains a new baseline")
    return sha256(weights)


def run_method(
    args: argparse.Namespace, runner: Runner, baseline: Path, classifier: Path, method: str, seed: int
) -> Path:
    """Fine-tunes and evaluates one method with one seed; returns the folder of its results."""
    experiment, ogdm = EXPERIMENTS[args.data], method == "ogdm"
    steps, more = (args.steps, trainer_flags(args.config)) if ogdm else (args.control_steps, {})
    train = {"data": args.data, "model": str(baseline), "steps": steps, "seed": seed} | experiment["finetune"] | more
    scoring = {"data": args.data, "samples": args.samples}
    if times := experiment["times"]:
        scoring["discretisation"] = ",".join(map("=".join, times.items()))
    made_of = json.dumps([train, scoring, fingerprint(baseline), classifier.name])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:8]
    folder = args.out / "runs" / f"{method}-seed{seed}-{key}"
    if scores(folder) is None:
        words = to_argv(train | {"output": folder})
        runner.run(f"{method}, seed {seed}: train", "ogdm_core.diffusers", words, folder / "log.jsonl", train["steps"])
        progress, total = folder / "evaluation.jsonl", sum(map(sum, score.GRID.values()))
        progress.unlink(missing_ok=True)  # of a score that was stopped
        output = {"classifier": classifier, "output": folder / "evaluation.json", "jobs": min(2, args.jobs)}
        words = [str(folder), *to_argv(scoring | output)]
        runner.run(f"{method}, seed {seed}: sample", "run.quickstart.score", words, progress, total)
    return folder


def scores(folder: Path) -> dict[str, Any] | None:
    """What run.quickstart.score wrote; None where a file of it is absent or damaged."""
    try:
        with zipfile.ZipFile(folder / "evaluation.npz"):
            return json.loads((folder / "evaluation.json").read_text())
    except (OSError, ValueError, zipfile.BadZipFile):
        return None


def observer_summary(folders: list[Path]) -> dict[str, Any]:
    """D's mean accuracy over the second half of the observation, and a sentence that says what it means."""
    accuracy = []
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "d_real_acc" in line]  # none in the plain end of a run
        lines = lines[len(lines) // 2 :]
        accuracy += [(line["d_real_acc"] + line["d_fake_acc"]) / 2 for line in lines]
    mean = sum(accuracy) / len(accuracy)
    words = f"The discriminator told real from fake in {100 * mean:.1f} % of the cases"
    if mean < 0.505:
        words += (
            ": no better than chance, so it gave no signal and OGDM here is plain training. "
            "Raise its learning rate (--ogdm-d-lr), lower R1 (--ogdm-r1), or look further ahead "
            "(--ogdm-k)."
        )
    else:
        words += " (50 % is chance). A little above chance is what a good denoiser leaves."
    return {"accuracy": mean, "at_chance": mean < 0.505, "words": words}


def main(argv: list[str] | None = None) -> int:
    """Runs it all; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        with exclusive(args.out / ".lock", f"working in {args.out}") as lock:
            work(argv, args, lock)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return 130
    except (RuntimeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def work(argv: Sequence[str], args: argparse.Namespace, lock: int) -> None:
    """Trains and scores what is not there yet, prints the table and writes the report."""
    start, runner = time.time(), Runner(lock)
    pairs = [(method, seed) for seed in args.seeds for method in ("ogdm", "control")]
    with ThreadPoolExecutor(args.jobs) as pool, runner:
        baseline = ensure_baseline(args, runner)
        classifier = score.ensure_classifier(args.out, args.data)
        one = partial(run_method, args, runner, baseline, classifier)
        folders = dict(zip(pairs, pool.map(one, *zip(*pairs, strict=True)), strict=True))

    rows = []
    for (method, seed), folder in sorted(folders.items()):
        found = scores(folder)
        rows += [{"method": method, "seed": seed} | row for row in found["rows"]]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    results = {
        "rows": rows,
        "command": shlex.join(["run/quickstart.sh", *argv]),
        "data": args.data,
        "config": {
            "finetune": EXPERIMENTS[args.data]["finetune"],
            "ogdm": args.config.to_dict(),
            **{name: getattr(args, name) for name in ("steps", "control_steps", "seeds", "samples")},
            "baseline_sha256": fingerprint(baseline),
        },
        "classifier_accuracy": found["classifier_accuracy"],
        "half_fid": found["half_fid"],
        "observer": observer_summary([folders["ogdm", seed] for seed in args.seeds]),
        "versions": versions(PACKAGES),
        "commit": commit(),
        "wall_time_seconds": round(time.time() - start, 1),
        "largest_process_mb": round(peak / (1024 if sys.platform != "darwin" else 1024**2)),
    }
    earlier = args.out / "results.json"
    if not runner.children and earlier.exists():  # nothing was left to do: the time it took stands
        kept = ("wall_time_seconds", "largest_process_mb")
        results |= {k: v for k, v in json.loads(earlier.read_text()).items() if k in kept}
    report.print_table(results)
    report.write(args.out, results, {m: folders[m, args.seeds[0]] for m in report.NAMES})
    for name in report.FILES:
        print(args.out / name)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what ends this ends the children
    sys.exit(main())
