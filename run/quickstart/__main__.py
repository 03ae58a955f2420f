"""The project's main job on a bare machine: does OGDM beat plain training at few steps?

From one pretrained baseline, two fine-tunes of equal length start: the control (plain loss) and
OGDM. Both see the same images and the same noise. Then both are sampled from the same initial
noise with six samplers at several NFEs, and FID and recall are measured.

    run/quickstart.sh --out out/quickstart

writes results.json, fid_vs_nfe.png, samples.png, trajectory.png and report.html. A run that
was stopped continues with the same command. Unless the flags say otherwise, OGDM runs with the
split projection, k 0.3, gamma 0.15 and t_max 0.85 (another projection: gamma 0.08, t_max 0.45;
digits: Euler's, 0.35, 0.06 and 0.7; half of gamma with hinge) and the light discriminator, fused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ogdm_core import cli, flags
from ogdm_core.config import OGDMConfig
from ogdm_core.files import sha256
from run.lock import exclusive
from run.provenance import commit, cores, versions
from run.quickstart.settings import EXPERIMENTS, fill_in

PACKAGES = ("torch", "diffusers", "accelerate", "numpy", "scikit-learn", "ogdm")


def parse(argv: list[str]) -> tuple[argparse.Namespace, OGDMConfig]:
    """The quickstart's flags, and the settings of the OGDM fine-tune: ours where none are given."""
    p = cli.Parser(prog="run/quickstart.sh", description=__doc__)
    add, count = p.add_argument, cli.number(int, 1)
    add("--out", type=Path, default=Path("out/quickstart"), help="folder to write")
    add("--data", choices=tuple(EXPERIMENTS), default="mnist",
        help="mnist: 16x16; digits: 8x8, half the time (default: mnist)")  # fmt: skip
    add("--seeds", type=cli.numbers(int, 0, 2**31), default=[0], metavar="0,1,...",
        help="seeds; each gets its own pair of fine-tunes (default: 0)")  # fmt: skip
    add("--steps", type=count, help="steps of each fine-tune (default: by data set)")
    add("--control-steps", type=count, help="steps of the control (default: as many as OGDM's); "
        "more of them give the control as much time as OGDM took")  # fmt: skip
    add("--samples", type=cli.number(int, 100),
        help="images per sampler and NFE, 100 or more (default: by data set)")  # fmt: skip
    add("--from-scratch", action="store_true", help="train the baseline anew, do not use ours")
    add("--jobs", type=count, default=min(2, cores()),
        help="fine-tunes, and cells of a score, side by side (default: one per core, at most 2)"
        )  # fmt: skip
    flags.add_arguments(p, "diffusers")
    args = p.parse_args(argv)
    fill_in(args)
    default = EXPERIMENTS[args.data]
    args.steps, args.samples = args.steps or default.steps, args.samples or default.samples
    args.control_steps = args.control_steps or args.steps
    return args, flags.from_args(vars(args) | {"ogdm": True}, "diffusers")


class Runner:
    """Runs child processes and shows their progress; stops them all when one fails."""

    def __init__(self, lock: int) -> None:
        """`lock` is the descriptor of the folder's lock, which the children hold as well."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(highlight=False)
        self.bar = Progress(
            TextColumn("{task.description:<22}"), BarColumn(20), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=self.console,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self.children: list[subprocess.Popen] = []
        self.lock = threading.Lock()
        self.stopping, self.inherited = False, (lock,)

    def run(self, name: str, module: str, *words: object) -> None:
        """One child: `python -m MODULE WORDS`; its lines `step I/N  note` move its bar.

        Its operations get one thread each: these networks gain nothing from more, and the result is
        the same on any number of cores. It has a session of its own; `__exit__` passes Ctrl-C on,
        once.
        """
        command = [sys.executable, "-m", module, *map(str, words)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.lock:
            if self.stopping:
                return
            child = subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=self.inherited,
            )  # fmt: skip
            self.children.append(child)
        task = self.bar.add_task(name, total=1, note="")
        printed, tail = -1.0, []
        for line in child.stdout:
            tail = [*tail[-19:], line]
            head, _, note = line.strip().partition("  ")
            if not head.startswith("step "):
                continue
            done, total = map(int, head[5:].split("/"))
            self.bar.update(task, completed=done, total=total, note=note)
            if not self.console.is_terminal and done / total >= printed + 0.2:
                printed = done / total
                self.console.print(f"{name}: {head}  {note}", soft_wrap=True)
        if child.wait() and not self.stopping:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{''.join(tail)}")

    def __enter__(self) -> Runner:
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        """After an error or Ctrl-C, asks every child to save and stop, and waits for them."""
        with self.lock:
            self.stopping = kind is not None
        for child in self.children if self.stopping else ():
            child.terminate()  # SIGINT is ignored below a shell's background job
        for child in self.children:
            child.wait()
        self.bar.stop()


def ensure_baseline(args: argparse.Namespace, runner: Runner) -> Path:
    """The folder of the pretrained baseline: ours, or one trained here."""
    experiment = EXPERIMENTS[args.data]
    if not args.from_scratch:
        return experiment.shipped
    folder = args.out / "baseline"
    runner.run("baseline", "ogdm_core.diffusers", "--data", args.data, "--output", folder,
               "--log-every", 100, *experiment.baseline.split())  # fmt: skip
    return folder


def fingerprint(model: Path) -> str:
    """Hash of a model's weights."""
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} is missing; --from-scratch trains a new baseline")
    return sha256(weights)


def run_method(args: argparse.Namespace, ogdm: list[str], runner: Runner, baseline: Path,
               classifier: Path, method: str, seed: int) -> Path:  # fmt: skip
    """Fine-tunes and evaluates one method with one seed; returns the folder of its results."""
    data, experiment = ["--data", args.data], EXPERIMENTS[args.data]
    steps, more = (args.steps, ogdm) if method == "ogdm" else (args.control_steps, [])
    train = [*data, "--model", str(baseline), "--steps", steps, "--seed", seed]
    train += [*experiment.finetune.split(), *more]
    score = [*data, "--samples", args.samples]
    if times := {**experiment.times, **(experiment.ogdm_times if method == "ogdm" else {})}:
        score += ["--discretisation", ",".join(map("=".join, times.items()))]
    made_of = json.dumps([train, score, fingerprint(baseline), classifier.name])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:8]
    folder = args.out / "runs" / f"{method}-seed{seed}-{key}"
    result, name = folder / "evaluation.json", f"{method}, seed {seed}"
    if scores(folder) is None:
        runner.run(f"{name}: train", "ogdm_core.diffusers", *train, "--output", folder)
        runner.run(f"{name}: sample", "run.quickstart.score", folder, *score, "--classifier",
                   classifier, "--output", result, "--jobs", min(2, args.jobs))  # fmt: skip
    return folder


def scores(folder: Path) -> dict[str, Any] | None:
    """What run.quickstart.score wrote; None where a file of it is absent or damaged."""
    try:
        with zipfile.ZipFile(folder / "evaluation.npz"):
            return json.loads((folder / "evaluation.json").read_text())
    except (OSError, ValueError, zipfile.BadZipFile):
        return None


def observer_summary(folders: list[Path]) -> dict[str, Any]:
    """D's accuracy over the second half of the OGDM fine-tunes, and what it means in words."""
    accuracy = []
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
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
    args, config = parse(argv)
    try:
        with exclusive(args.out / ".lock", f"working in {args.out}") as lock:
            work(argv, args, config, lock)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return 130
    except (RuntimeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def work(argv: list[str], args: argparse.Namespace, config: OGDMConfig, lock: int) -> None:
    """Trains and scores what is not there yet, prints the table and writes the report."""
    from . import report, score

    ogdm, start, runner = flags.to_argv(config), time.time(), Runner(lock)
    pairs = [(method, seed) for seed in args.seeds for method in ("ogdm", "control")]
    with ThreadPoolExecutor(args.jobs) as pool, runner:
        baseline = ensure_baseline(args, runner)
        classifier = score.ensure_classifier(args.out, args.data, runner.console.print)
        one = partial(run_method, args, ogdm, runner, baseline, classifier)
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
            "finetune": EXPERIMENTS[args.data].finetune, "ogdm": ogdm, "steps": args.steps,
            "control_steps": args.control_steps, "seeds": args.seeds, "samples": args.samples,
            "baseline_sha256": fingerprint(baseline),
        },
        "classifier_accuracy": found["classifier_accuracy"], "half_fid": found["half_fid"],
        "observer": observer_summary([folders["ogdm", seed] for seed in args.seeds]),
        "versions": versions(PACKAGES),
        "commit": commit(),
        "wall_time_seconds": round(time.time() - start, 1),
        "largest_process_mb": round(peak / (1024 if sys.platform != "darwin" else 1024**2)),
    }  # fmt: skip
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
