"""What observation costs a training step, in time and memory, measured on this machine.

Every number is a ratio to the baseline's step of the same network in the same process; steps of
the baseline and of the cases take turns. A run that was stopped keeps what it measured, and the
same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

from ogdm_core.files import write_json
from run.provenance import commit, versions

from . import extras, report
from .cases import CASES, GROWTH, choose
from .measure import BASELINE, Subject, count_step, silent, subjects
from .rounds import Timings, quartiles, run_round, summarise, warm_up
from .shapes import growth_of_operations
from .trainers import PAPER, QUICK, Size, Trainer, build, find_backbone

GROWTH_REPEATS = 2
PACKAGES = ("torch", "diffusers", "numpy", "ogdm")


def parser() -> argparse.ArgumentParser:
    """Every flag of the benchmark."""
    p = argparse.ArgumentParser(
        prog="run/benchmark.sh", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases:\n" + "\n".join(f"  {n:<18}{c.words}" for n, c in CASES.items()),
    )  # fmt: skip
    add = p.add_argument
    add(
        "--out",
        type=Path,
        default=Path("out/benchmark/speed.json"),
        metavar="FILE.json",
        help="results; FILE.md and FILE.png beside it (default: out/benchmark/speed.json)",
    )
    add("--cases", metavar="A,B,...", help="some of the cases below, or all (default: the first 8)")
    add("--repeats", type=int, default=5, metavar="N", help="rounds of timed steps (default: 5)")
    add("--batch", type=int, metavar="N", help="images a step (default: 2)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add(
        "--backbone",
        choices=("auto", "edm", "diffusers"),
        default="auto",
        help="auto is EDM's own network where third_party/edm is here (default: auto)",
    )
    add("--resolutions", metavar="R,...", help="growth: also measure at these image sizes")
    add("--batches", metavar="N,...", help="growth: also measure at these batch sizes")
    add("--channels", metavar="C,...", help="growth: also measure with these network widths")
    add(
        "--no-time",
        action="store_true",
        help="growth: count operations from shapes, in seconds; time nothing at all",
    )
    add("--quick", action="store_true", help="a tiny network and D: a trial of the machinery")
    add("--no-extras", action="store_true", help="leave out sampling, imports and checkpoints")
    add("--fresh", action="store_true", help="forget what --out holds and start anew")
    return p


class Benchmark:
    """The results of one --out file, and the work that adds to them."""

    def __init__(self, args: argparse.Namespace, argv: list[str], say: Callable[[str], None]):
        self.args, self.argv, self.say = args, argv, say
        self.names = choose(args.cases)
        self.device = torch.device(args.device)
        size = QUICK if args.quick else PAPER
        self.size = replace(size, batch=args.batch or size.batch)
        self.backbone = find_backbone(args.backbone)
        self.results: dict = {}
        self.timings = Timings()
        self.counted: set[str] = set()  # in this process, which warmed it up
        self._trainer: Trainer | None = None
        self._subjects: dict[str, Subject] = {}

    @property
    def trainer(self) -> Trainer:
        """The network, built when it is first needed."""
        if self._trainer is None:
            self._trainer = build(self.backbone, self.size, self.device)
        return self._trainer

    @property
    def subjects(self) -> dict[str, Subject]:
        """The baseline and the cases on that network."""
        if not self._subjects:
            self._subjects = subjects(self.trainer, self.names, self.args.quick)
        return self._subjects

    def setup(self) -> dict:
        """What has to be the same for timings to be comparable."""
        return {
            "network": self.trainer.words,
            "backbone": self.backbone,
            "parameters": sum(p.numel() for p in self.trainer.net.parameters()),
            **asdict(self.size),
            "device": _device_name(self.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "quick": self.args.quick,
        }

    def resume(self) -> None:
        """Takes up what --out holds, if it was measured in the same way."""
        self.results = {"setup": self.setup(), "cases": {}}
        if self.args.fresh or not self.args.out.is_file():
            return
        try:
            found = json.loads(self.args.out.read_text())
            same = found["setup"] == self.results["setup"]
            timings = Timings.from_dict(found["timings"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"--out: {self.args.out} holds something else; name another file, or --fresh"
            ) from None
        if not same:
            raise ValueError(
                f"--out: {self.args.out} was measured with another setup; name another file, or "
                "--fresh to replace it"
            )
        self.results, self.timings = found, timings

    def save(self) -> None:
        """Writes the results as they stand."""
        self.finish()
        command = shlex.join(["run/benchmark.sh", *self.argv])
        earlier = [c for c in self.results.get("commands", []) if c != command]
        self.results |= {
            "command": command,
            "commands": [*earlier, command],  # all that added to this file
            "commit": commit(),
            "versions": versions(PACKAGES),
            "timings": self.timings.to_dict(),
        }
        write_json(self.args.out, self.results)

    def count(self) -> None:
        """Operations, evaluations and memory: one step of each kind."""
        counts = self.results.setdefault("counts", {})
        for name, subject in self.subjects.items():
            if name in counts:
                continue
            self.say(f"counting {name}")
            if name == BASELINE:  # Adam makes its state in a first step
                self.trainer.step(None, None, silent)
            found = {kind: count_step(self.trainer, subject, kind) for kind in subject.kinds()}
            counts[name] = {"kinds": found, "weights": subject.kinds()}
            self.counted.add(name)
            self.save()

    def time(self) -> None:
        """Rounds of timed steps until there are --repeats of them."""
        if self.timings.rounds >= self.args.repeats and self._timed_all():
            return
        for name, kind in warm_up(self.trainer, self.subjects, self.counted):
            self.say(f"warming up: {name} {kind}")
        while self.timings.rounds < self.args.repeats or not self._timed_all():
            number = self.timings.rounds + 1
            for name, kind in run_round(self.trainer, self.subjects, self.timings):
                self.say(f"round {number}/{self.args.repeats}: {name} {kind}")
            self.save()

    def _timed_all(self) -> bool:
        """Whether every case has timings of every kind of its steps."""
        return all(
            {t.kind for t in self.timings.cases.get(name, [])} >= set(subject.kinds())
            for name, subject in self.subjects.items()
            if name != BASELINE
        )

    def extras(self) -> None:
        """Sampling, imports, bookkeeping, checkpoint."""
        if self.args.no_extras or "import" in self.results:
            return
        exact = self.subjects.get("euler_exact")
        observer = exact.observer if exact else self.trainer.observer(
            CASES["euler_exact"], self.args.quick
        )  # fmt: skip
        for name, words, work in (
            ("bookkeeping", "timing the observer's bookkeeping",
             lambda: extras.bookkeeping(self.trainer, self._baseline_seconds())),
            ("checkpoint", "timing the observer's checkpoint", lambda: extras.checkpoint(observer)),
            ("sampling", "timing samplers",
             lambda: extras.sampling(self.trainer, observer, max(2, self.args.repeats))),
            ("import", "timing imports", lambda: extras.import_time(1 if self.args.quick else 3)),
        ):  # fmt: skip
            self.say(words)
            self.results[name] = work()
            self.save()

    def _baseline_seconds(self) -> float:
        return median(sum(b.values()) for b in self.timings.baseline)

    def growth(self) -> None:
        """The ratios at other image sizes, batches and widths, one changed at a time."""
        sizes = growth_sizes(self.args, self.size)
        self.results.setdefault("growth", [])
        for size in sizes:
            key = {name: getattr(size, name) for name in ("batch", "resolution", "channels")}
            if any(key.items() <= g.items() and self._grown(g) for g in self.results["growth"]):
                continue
            self._trainer, self._subjects = None, {}  # make room
            self.say(f"growth: {key}")
            if self.args.no_time:
                trainer = build(self.backbone, size, torch.device("meta"))
                counted = growth_of_operations(trainer, GROWTH, self.args.quick)
                self._keep_growth(key, {"cases": counted})
                continue
            trainer = build(self.backbone, size, self.device)
            group = subjects(trainer, list(GROWTH), self.args.quick)
            timings, counts = Timings(), {}
            trainer.step(None, None, silent)
            for name, subject in group.items():
                kinds = {kind: count_step(trainer, subject, kind) for kind in subject.kinds()}
                counts[name] = {"kinds": kinds, "weights": subject.kinds()}
            for _ in range(GROWTH_REPEATS):
                for name, kind in run_round(trainer, group, timings):
                    self.say(f"growth {key}: {name} {kind}")
            cases = {name: summarise(name, timings, group[name].kinds()) for name in GROWTH}
            for name in GROWTH:
                cases[name] |= relate(counts[name], counts[BASELINE])
            seconds = median(sum(b.values()) for b in timings.baseline)
            self._keep_growth(key, {"baseline_seconds": seconds, "cases": cases})

    def _grown(self, entry: dict) -> bool:
        """Whether an entry of the results has all that is asked for: timings, unless --no-time."""
        return set(GROWTH) <= set(entry["cases"]) and (
            self.args.no_time or "baseline_seconds" in entry
        )

    def _keep_growth(self, key: dict, found: dict) -> None:
        """Puts an entry in the place of an earlier one of the same size; timings are not lost."""
        same = [g for g in self.results["growth"] if key.items() <= g.items()]
        for earlier in same:
            if "baseline_seconds" in earlier and "baseline_seconds" not in found:
                found = earlier | {"cases": found["cases"] | earlier["cases"]}
        others = [g for g in self.results["growth"] if g not in same]
        self.results["growth"] = [*others, key | found]
        self.save()

    def finish(self) -> None:
        """Ratios from whatever was measured."""
        counts, cases = self.results.get("counts", {}), {}
        if self.timings.baseline:
            totals = [sum(b.values()) for b in self.timings.baseline]
            phases = {
                p: median(b.get(p, 0.0) / t for b, t in zip(self.timings.baseline, totals,
                                                            strict=True))
                for p in ("denoiser", "optimisers", "other")
            }  # fmt: skip
            self.results["baseline"] = {
                "seconds": median(totals), "quartiles": quartiles(totals),
                "samples": len(totals), "phases": phases,
            }  # fmt: skip
            if BASELINE in counts:
                (plain,) = counts[BASELINE]["kinds"].values()
                self.results["baseline"] |= {k: plain[k] for k in ("flops", "peak_bytes")}
        for name in CASES:
            entry: dict = {}
            kinds = {t.kind for t in self.timings.cases.get(name, [])}
            weights = counts.get(name, {}).get("weights") or self._weights(name)
            if kinds and weights and kinds >= set(weights):
                entry |= summarise(name, self.timings, weights)
            if name in counts and BASELINE in counts:
                entry |= relate(counts[name], counts[BASELINE])
            if entry:
                cases[name] = entry | {"settings": CASES[name].config(self.args.quick).to_dict()}
        self.results["cases"] = cases

    def _weights(self, name: str) -> dict[str, float] | None:
        return self._subjects[name].kinds() if name in self._subjects else None


def relate(counts: dict, baseline: dict) -> dict:
    """Ratios of memory and operations to the baseline's, and the evaluations beside them.

    Operations and evaluations are means over steps with and without R1, memory is the larger.
    """
    kinds, weights = counts["kinds"], counts["weights"]
    (plain,) = baseline["kinds"].values()

    def average(name: str) -> float:
        return sum(weights[kind] * kinds[kind][name] for kind in kinds)

    return {
        "memory_ratio": max(k["peak_bytes"] for k in kinds.values()) / plain["peak_bytes"],
        "flops_ratio": average("flops") / plain["flops"],
        "evaluations": {n: average(n) for n in ("denoiser_forward", "d_forward", "d_calls")},
    }


def growth_sizes(args: argparse.Namespace, size: Size) -> list[Size]:
    """The sizes that --resolutions, --batches and --channels ask for."""
    one = replace(size, batch=1)
    sizes = [replace(one, resolution=r) for r in _numbers("--resolutions", args.resolutions)]
    sizes += [replace(size, batch=n) for n in _numbers("--batches", args.batches)]
    sizes += [replace(one, channels=c) for c in _numbers("--channels", args.channels)]
    for s in sizes:
        if s.resolution < 8 or s.resolution & (s.resolution - 1):
            raise ValueError(f"--resolutions: {s.resolution} is not a power of two from 8")
        if s.channels % 16:
            raise ValueError(f"--channels: {s.channels} is not a multiple of 16")
    return list(dict.fromkeys(sizes))


def _numbers(flag: str, text: str | None) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise ValueError(f"{flag}: {text!r} is not allowed; give whole numbers like 32,64")
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})"


def main(argv: list[str] | None = None) -> int:
    """Runs it all; returns the exit code."""
    from rich.console import Console

    argv = sys.argv[1:] if argv is None else argv
    p = parser()
    args = p.parse_args(argv)
    for flag, value in (("--repeats", args.repeats), ("--batch", args.batch),
                        ("--threads", args.threads)):  # fmt: skip
        if value is not None and value < 1:
            p.error(f"{flag}: {value} is not allowed; give 1 or more")
    if args.device not in ("cpu", "cuda") or (
        args.device == "cuda" and not torch.cuda.is_available()
    ):
        p.error(f"--device: {args.device!r} is not here; use cpu" + (
            " or cuda" if torch.cuda.is_available() else ""))  # fmt: skip
    if args.out.suffix != ".json":
        p.error(f"--out: {str(args.out)!r} is not allowed; name a file that ends in .json")
    if args.no_time and not (args.resolutions or args.batches or args.channels):
        p.error("--no-time counts growth: give --resolutions, --batches or --channels with it")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(args.threads or cores)
    console = Console(stderr=False)
    with console.status("building the network") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)

        try:
            growth_sizes(args, PAPER)
            benchmark = Benchmark(args, argv, say)
            benchmark.resume()
        except ValueError as error:
            p.error(str(error))
        if benchmark.backbone == "diffusers" and args.backbone == "auto":
            say("third_party/edm is not here: a diffusers U-Net of like cost stands in; "
                "run/setup.sh edm fetches EDM's own")  # fmt: skip
        stopped = False
        try:
            works = [benchmark.count, benchmark.time, benchmark.extras, benchmark.growth]
            for work in works[-1:] if args.no_time else works:
                work()
        except KeyboardInterrupt:
            stopped = True
        benchmark.save()
    results = benchmark.results
    args.out.with_suffix(".md").write_text(report.markdown(results))
    report.show(results, console)
    written = [args.out, args.out.with_suffix(".md")]
    if any("phases" in case for case in results["cases"].values()):
        written.append(report.picture(results, args.out.with_suffix(".png")))
    console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    if stopped:
        console.print("stopped; the same command continues from here", highlight=False)
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
