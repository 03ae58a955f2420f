"""The project's main job on a bare machine: does OGDM beat plain training at few steps?

From one pretrained baseline, two fine-tunes of equal length start: the control (plain loss) and
OGDM. Both see the same images and the same noise. Then both are sampled from the same initial
noise with Euler, S-PNDM, F-PNDM and Heun at several NFEs, and FID and recall are measured.

    run/quickstart.sh --out out/quickstart

writes results.json, fid_vs_nfe.png, samples.png and report.html. Everything is seeded; a run that
was stopped continues with the same command.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ogdm_core import flags
from ogdm_core.config import OGDMConfig
from run.provenance import commit, versions

HERE = Path(__file__).parent
METHODS = ("control", "ogdm")
PACKAGES = ("torch", "diffusers", "accelerate", "numpy", "scikit-learn", "ogdm")


@dataclass(frozen=True)
class Job:
    """What differs between the data sets: a baseline, how to make it, how to fine-tune it."""

    baseline: str  # flags that train the baseline from scratch
    finetune: str  # flags of both fine-tunes
    ogdm: dict[str, str]  # by adversarial form: flags of the OGDM one, unless the user gives others
    steps: int  # of each fine-tune
    samples: int  # per sampler and NFE
    shipped: Path | None


_OGDM = "--ogdm-k 0.35 --ogdm-t-max 0.7 --ogdm-d-kind light --ogdm-fused true"
_FORMS = {
    "nonsaturating": f"{_OGDM} --ogdm-gamma 0.06",
    "hinge": f"{_OGDM} --ogdm-gamma 0.03",
}
JOBS = {
    "digits": Job(
        baseline="--channels 8,16 --steps 8000 --lr 8e-4",
        finetune="--lr 1e-4 --ema 0.995 --anneal",
        ogdm=_FORMS,
        steps=2000,
        samples=2500,
        shipped=HERE / "baseline-digits",
    ),
    "mnist": Job(
        baseline="--channels 8,16,32 --norm-groups 2 --steps 2500 --lr 8e-4",
        finetune="--lr 1e-4 --ema 0.995 --anneal",
        ogdm=_FORMS,
        steps=1000,
        samples=1000,
        shipped=None,
    ),
}


def parser() -> argparse.ArgumentParser:
    """Every flag of the quickstart; OGDM's own flags are passed on to the OGDM fine-tune."""
    p = argparse.ArgumentParser(
        prog="run/quickstart.sh", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = p.add_argument
    add("--out", type=Path, default=Path("out/quickstart"), help="folder to write")
    add("--data", choices=tuple(JOBS), default="digits",
        help="digits: 8x8, minutes; mnist: 16x16, longer (default: digits)")  # fmt: skip
    add("--seeds", default="0", metavar="0,1,...", help="one pair of fine-tunes each (default: 0)")
    add("--steps", type=int, help="steps of each fine-tune (default: by data set)")
    add("--samples", type=int, help="images per sampler and NFE (default: by data set)")
    add("--from-scratch", action="store_true", help="train the baseline anew, do not use ours")
    add("--jobs", type=int, help="fine-tunes side by side (default: one a core, at most 2)")
    flags.add_arguments(p)
    return p


class Runner:
    """Runs child processes with their progress shown; stops them all when one fails."""

    def __init__(self, jobs: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console()
        self.bar = Progress(
            TextColumn("{task.description:<22}"), BarColumn(20), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=self.console,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self.pool = ThreadPoolExecutor(jobs)
        self.children: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.stopping = False
        self.ran = 0

    def run(self, name: str, module: str, argv: list[str]) -> None:
        """One child: `python -m MODULE ARGV`; its lines `step I/N  note` move its bar.

        It gets one thread: these networks gain nothing from more, and the result is the same on
        any number of cores.
        """
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", module, *argv]
        with self.lock:
            if self.stopping:
                return
            child = subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self.children.add(child)
            self.ran += 1
        task = self.bar.add_task(name, total=1, note="")
        last, tail = -1.0, []
        for line in child.stdout:
            tail = [*tail[-19:], line]
            head, _, note = line.strip().partition("  ")
            if not head.startswith("step "):
                continue
            done, _, total = head[5:].partition("/")
            self.bar.update(task, completed=int(done), total=int(total), note=note)
            if not self.console.is_terminal and int(done) / int(total) >= last + 0.2:
                last = int(done) / int(total)
                self.console.print(f"{name}: {head}  {note}", soft_wrap=True, highlight=False)
        code = child.wait()
        with self.lock:
            self.children.discard(child)
        if code and not self.stopping:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{''.join(tail)}")

    def stop(self) -> None:
        """Asks every child to save and stop, and waits for them."""
        with self.lock:
            self.stopping = True
            children = list(self.children)
        for child in children:
            child.send_signal(signal.SIGINT)
        for child in children:
            child.wait()

    def all(self, work: list) -> None:
        """Runs callables side by side; an error or Ctrl-C stops the others first."""
        futures = [self.pool.submit(w) for w in work]
        try:
            for future in futures:
                future.result()
        except BaseException:
            self.stop()
            self.pool.shutdown(cancel_futures=True)
            raise


def ensure_baseline(args, job: Job, runner: Runner) -> Path:
    """The folder of the pretrained baseline: ours, or one trained here."""
    if job.shipped and not args.from_scratch:
        return job.shipped
    folder = args.out / "baseline"
    runner.run("baseline", "ogdm_core.trainer", [
        "--data", args.data, "--output", str(folder), "--log-every", "100", *job.baseline.split(),
    ])  # fmt: skip
    return folder


def ensure_classifier(args) -> Path:
    """The classifier whose features FID and recall are measured in."""
    from ogdm_core.trainer.images import load
    from run.evaluate.classifier import save_classifier, train_classifier

    code = hashlib.sha256((HERE.parent / "evaluate" / "classifier.py").read_bytes()).hexdigest()[:8]
    path = args.out / f"classifier-{args.data}-{code}.pt"  # other code, other features
    if not path.exists():
        save_classifier(path, *train_classifier(load(args.data)))
    return path


def run_method(runner: Runner, args, method: str, seed: int, baseline: Path, classifier: Path,
               ogdm: list[str]) -> Path:  # fmt: skip
    """Fine-tunes and evaluates one method with one seed; returns the folder of its results."""
    job = JOBS[args.data]
    train = ["--data", args.data, "--model", str(baseline), "--steps", str(args.steps),
             "--seed", str(seed), *job.finetune.split()]  # fmt: skip
    if method == "ogdm":
        train += ["--ogdm", *ogdm]
    evaluate = ["--data", args.data, "--samples", str(args.samples or job.samples)]
    made_of = [train, evaluate, fingerprint(baseline), classifier.name]
    key = hashlib.sha256(json.dumps(made_of).encode())
    folder = args.out / "runs" / f"{method}-seed{seed}-{key.hexdigest()[:8]}"
    if not (folder / "evaluation.json").exists():
        runner.run(f"{method}, seed {seed}: train", "ogdm_core.trainer",
                   [*train, "--output", str(folder)])  # fmt: skip
        runner.run(f"{method}, seed {seed}: sample", "run.quickstart.score",
                   [str(folder), *evaluate, "--classifier", str(classifier),
                    "--output", str(folder / "evaluation.json")])  # fmt: skip
    return folder


def fingerprint(model: Path) -> str:
    """Hash of a model's weights."""
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} is missing; --from-scratch trains a new baseline")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def observer_summary(folders: list[Path]) -> dict:
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


def given_ogdm_flags(argv: list[str], job: Job) -> list[str]:
    """The job's OGDM flags, with those of the command line in place of theirs."""
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_arguments(p)
    form = p.parse_known_args(argv)[0].ogdm_adversarial
    merged, _ = p.parse_known_args([*job.ogdm[form].split(), *argv])
    config = flags.from_args(vars(merged) | {"ogdm": True})
    default = OGDMConfig().to_dict()
    flags = []
    for name, value in config.to_dict().items():
        if value != default[name]:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags += [f"--ogdm-{name.replace('_', '-')}", text]
    return flags


def main(argv: list[str] | None = None) -> int:
    """Runs it all; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    p = parser()
    args = p.parse_args(argv)
    job = JOBS[args.data]
    args.steps = job.steps if args.steps is None else args.steps
    if args.steps < 1:
        p.error(f"--steps: {args.steps} is not allowed; give 1 or more")
    if args.samples is not None and args.samples < 100:
        p.error(f"--samples: {args.samples} is not allowed; FID in 64 features needs 100 or more")
    try:
        seeds = [int(s) for s in args.seeds.split(",")]
    except ValueError:
        p.error(f"--seeds: {args.seeds!r} is not allowed; give whole numbers like 0,1,2")
    start = time.time()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ogdm = given_ogdm_flags(argv, job)
    runner = Runner(args.jobs or min(2, cores))
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with runner.bar:
            baseline = ensure_baseline(args, job, runner)
            classifier = ensure_classifier(args)
            folders: dict[tuple[str, int], Path] = {}

            def work(method: str, seed: int):
                folders[method, seed] = run_method(
                    runner, args, method, seed, baseline, classifier, ogdm
                )

            pairs = [(method, seed) for seed in seeds for method in reversed(METHODS)]
            runner.all([lambda m=m, s=s: work(m, s) for m, s in pairs])
    except KeyboardInterrupt:
        runner.stop()
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return 130
    except (RuntimeError, FileNotFoundError) as error:
        runner.stop()
        print(f"error: {error}", file=sys.stderr)
        return 1

    from . import report

    rows, evaluations = [], {}
    for (method, seed), folder in sorted(folders.items()):
        evaluations[method, seed] = json.loads((folder / "evaluation.json").read_text())
        rows += [{"method": method, "seed": seed} | r for r in evaluations[method, seed]["rows"]]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    results = {
        "rows": rows,
        "command": shlex.join(["run/quickstart.sh", *argv]),
        "data": args.data,
        "config": {
            "finetune": job.finetune.split(), "ogdm": ogdm, "steps": args.steps, "seeds": seeds,
            "samples": args.samples or job.samples, "baseline_sha256": fingerprint(baseline),
        },
        "classifier_accuracy": evaluations["control", seeds[0]]["classifier_accuracy"],
        "observer": observer_summary([folders["ogdm", s] for s in seeds]),
        "versions": versions(PACKAGES),
        "commit": commit(),
        "wall_time_seconds": round(time.time() - start, 1),
        "largest_process_mb": round(peak / (1024 if sys.platform != "darwin" else 1024**2)),
    }  # fmt: skip
    earlier = args.out / "results.json"
    if not runner.ran and earlier.exists():  # nothing was left to do: the time it took stands
        kept = ("wall_time_seconds", "largest_process_mb")
        results |= {k: v for k, v in json.loads(earlier.read_text()).items() if k in kept}
    report.write(args.out, results, {m: folders[m, seeds[0]] for m in METHODS})
    report.print_table(results)
    for name in report.FILES:
        print(args.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
