"""What observation costs a training step, in time, memory and operations, on this machine.

Every number is a ratio to the plain step of the same network in the same process; plain steps and
observed ones alternate.
"""

import argparse
import contextlib
import platform
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ogdm_core.cli import Parser, number
from ogdm_core.files import write_json, write_text
from run.provenance import ROOT, commit, versions

from .cases import CASES, DEFAULT, PAPER, QUICK, choose

EDM = ROOT / "third_party" / "edm" / "training" / "networks.py"


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags, with `size` and `backbone` worked out; what cannot work is refused."""
    cases = "\n".join(f"  {name:<18}{case.words}" for name, case in CASES.items())
    p = Parser(prog="run/benchmark.sh", description=__doc__, epilog=f"cases:\n{cases}")
    add, count = p.add_argument, number(int, 1)
    # fmt: off
    add("--out", metavar="FILE.json", type=Path, default=Path("out/benchmark/speed.json"),
        help="results; FILE.md and FILE.png beside it (%(default)s)")
    add("--cases", metavar="A,B,...", type=choose, default=DEFAULT,
        help="some of the cases below, or all (the first 8)")
    add("--repeats", metavar="N", type=count, default=5, help="rounds of timed steps (5)")
    add("--no-time", action="store_true",
        help="count operations and evaluations from shapes alone, at any size; time nothing")
    add("--batch", metavar="N", type=count, help="images per step (2)")
    add("--resolution", metavar="N", type=count, help="width and height of the images (32)")
    add("--channels", metavar="N", type=count, help="the network's base channels (128)")
    add("--threads", metavar="N", type=count, help="CPU threads (one per core)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--backbone", choices=("auto", "edm", "diffusers"), default="auto",
        help="auto is EDM's own network where third_party/edm is here (auto)")
    add("--quick", action="store_true", help="a tiny network and D: a trial of the machinery")
    # fmt: on
    args = p.parse_args(argv)
    if args.out.suffix != ".json":
        p.error(f"--out: {str(args.out)!r} is not allowed; name a file that ends in .json")
    given = {n: v for n in ("batch", "resolution", "channels") if (v := getattr(args, n))}
    args.size = size = replace(QUICK if args.quick else PAPER, **given)
    if size.resolution < 8 or size.resolution & (size.resolution - 1):
        p.error(f"--resolution: {size.resolution} is not a power of two from 8")
    if size.channels % 16:
        p.error(f"--channels: {size.channels} is not a multiple of 16")
    args.stands_in = args.backbone == "auto" and not EDM.is_file()
    if args.backbone == "auto":
        args.backbone = "diffusers" if args.stands_in else "edm"
    elif args.backbone == "edm" and not EDM.is_file():
        p.error("--backbone: third_party/edm is not here; run/setup.sh edm fetches it")
    import torch

    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if args.device not in devices:
        p.error(f"--device: {args.device!r} is not here; use {' or '.join(devices)}")
    return args


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Counts, times, writes the results after every round; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    import torch
    from rich.console import Console
    from rich.markdown import Markdown
    from torch._subclasses.fake_tensor import FakeTensorMode

    from . import report
    from .measure import BASELINE, Steps, summarise
    from .step import BACKBONES, Trainer

    if args.stands_in:
        say("third_party/edm is not here: a diffusers U-Net of about the same cost stands in; "
            "run/setup.sh edm fetches EDM's own")  # fmt: skip
    torch.set_num_threads(args.threads or torch.get_num_threads())
    torch.manual_seed(0)
    network = BACKBONES[args.backbone](args.size)
    network.module.to(args.device)
    cpu = f"CPU ({platform.machine()})"
    results: dict[str, Any] = {
        "command": shlex.join(["run/benchmark.sh", *argv]),
        "commit": commit(),
        "versions": versions(("torch", "diffusers", "numpy", "ogdm")),
        "setup": asdict(args.size) | {
            "network": network.words,
            "backbone": args.backbone,
            "parameters": sum(p.numel() for p in network.module.parameters()),
            "device": cpu if args.device == "cpu" else torch.cuda.get_device_name(),
            "threads": torch.get_num_threads(),
            "quick": args.quick,
        },
        "settings": {name: CASES[name].config(args.quick).to_dict() for name in args.cases},
        "timings": [],
    }  # fmt: skip
    counts, code = {}, 0
    steps = Steps(Trainer(network, args.size.batch), args.cases, args.quick)
    shapes = FakeTensorMode(allow_non_fake_inputs=True) if args.no_time else None
    try:
        with shapes or contextlib.nullcontext():
            steps.take(BASELINE, "plain")  # Adam makes its state in a first step
            for name in (BASELINE, *args.cases):
                say(f"counting {name}")
                counts[name] = steps.count(name, memory=not args.no_time)
        for i in range(0 if args.no_time else args.repeats):
            for timing in steps.round(i):
                results["timings"].append(timing)
                say(f"round {i + 1} of {args.repeats}: {timing['case']} {timing['kind']}")
            write_json(args.out, results | summarise(counts, results["timings"]))
    except KeyboardInterrupt:
        code = 130
    if BASELINE not in counts:
        return code
    results |= summarise(counts, results["timings"])
    written = [args.out, args.out.with_suffix(".md")]
    write_json(args.out, results)
    write_text(written[1], report.markdown(results))
    if any("ratio" in case for case in results["cases"].values()):
        written.append(report.picture(results, args.out.with_suffix(".png")))
    console = Console()
    console.print(Markdown(report.markdown(results, len(report.COLUMNS) - 1)))  # fits a terminal
    console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
