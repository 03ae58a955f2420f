"""What `run/benchmark.sh` runs."""

import platform
import shlex
import sys
from typing import Any

import torch
from tqdm import tqdm

from ogdm_core.cli import bar_interval, errors_in_one_line
from ogdm_core.files import check_writable, write_json, write_text
from run.provenance import commit, versions

from . import report
from .flags import CASES, EDM, parse
from .measure import BASELINE, Steps, summarise
from .step import Trainer, edm


def main(argv: list[str] | None = None) -> int:
    """Counts, times, writes the results after every round; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    with errors_in_one_line():
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU here; leave the flag out")
        if not EDM.joinpath("training").is_dir():
            raise ValueError("third_party/edm is not here; run/setup.sh edm fetches it")
        check_writable(args.out)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    torch.manual_seed(0)
    network = edm(args.resolution, args.channels)
    network.module.to(args.device)
    cpu = f"CPU ({platform.machine()})"
    results: dict[str, Any] = {
        "command": shlex.join(["run/benchmark.sh", *argv]),
        "commit": commit(),
        "versions": versions(("torch", "numpy", "ogdm")),
        "setup": {
            "network": network.words,
            "parameters": sum(p.numel() for p in network.module.parameters()),
            "batch": args.batch,
            "resolution": args.resolution,
            "channels": args.channels,
            "device": cpu if args.device == "cpu" else torch.cuda.get_device_name(),
            "threads": torch.get_num_threads(),
        },
        "settings": {name: CASES[name].config.to_dict() for name in args.cases},
        "timings": [],
    }
    counts, code = {}, 0
    steps = Steps(Trainer(network, args.batch), args.cases, shapes=args.no_time)
    try:
        for name in tqdm((BASELINE, *args.cases), "counting", mininterval=bar_interval()):
            counts[name] = steps.count(name)
        for i in tqdm(range(0 if args.no_time else args.repeats), "rounds", mininterval=bar_interval()):
            results["timings"] += steps.round(i)
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
    print(report.markdown(results, len(report.COLUMNS) - 1))  # fits a terminal
    print("wrote", ", ".join(map(str, written)))
    return code


if __name__ == "__main__":
    sys.exit(main())
