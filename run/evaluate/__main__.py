"""What `run/evaluate.sh` runs."""

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ogdm_core.cli import errors_in_one_line
from ogdm_core.files import check_writable, write_json
from run.provenance import commit, versions

from . import adm, curve, torch_evaluator
from .flags import ADM, OF_MODEL, parse
from .sources import Source, open_source, planned

PACKAGES = ("torch", "numpy", "torch-fidelity", "ogdm")


def main(argv: list[str] | None = None) -> int:
    """Prints the numbers; ends with status 2 and the reason for what the user can mend."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    started = time.time()
    evaluator = adm if args.evaluator == ADM else torch_evaluator
    try:
        with errors_in_one_line(), tempfile.TemporaryDirectory() as folder:
            for file in filter(None, (args.json, args.save_statistics, args.curve)):
                check_writable(file)
            reference = open_source(args.reference)
            size = reference.images.shape if reference.images else (1, 1, 1)  # as far as is known
            samples = planned(args.samples, args.count, size) if args.model else open_source(args.samples)
            evaluator.check(reference, samples, args)
            if args.curve:
                return draw_curve(reference, evaluator, args, argv)
            if args.model:
                file = Path(folder, f"{args.sampler}-{args.nfe}.npz")
                samples = curve.drawn(args.samples, file, reference, evaluator, args)
            found = evaluator.evaluate(reference, samples, args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the stored features, but samples a model anew", file=sys.stderr)
        return 130
    result = found | {
        "evaluator": args.evaluator,
        "reference": str(args.reference),
        "samples": str(args.samples),
        **made_by(args, argv),
        "versions": versions(PACKAGES) | found.get("versions", {}),
        "seconds": round(time.time() - started, 1),
    }
    show(result)
    try:
        if args.json:
            write_json(args.json, result)
    except OSError as error:
        print(f"error: the numbers above could not be written to {args.json}: {error}", file=sys.stderr)
        return 2
    return 0


def draw_curve(reference: Source, evaluator: Any, args: argparse.Namespace, argv: list[str]) -> int:
    """--curve: every snapshot's numbers, and their picture."""
    points, made = curve.scores(reference, evaluator, args), made_by(args, argv)
    curve.plot(points, args, made["command"])
    print(f"wrote {args.curve}")
    if args.json:
        write_json(args.json, {"points": points, **made, "versions": versions(PACKAGES)})
    return 0


def made_by(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """How the samples of a model were drawn, the command and the commit."""
    return {
        "sampling": {name: getattr(args, name) for name in (*OF_MODEL, "seed")} if args.model else None,
        "command": shlex.join(["python", "-m", "run.evaluate", *argv]),
        "commit": commit(),
    }


def show(result: dict[str, Any]) -> None:
    """Prints the numbers as a small table on stdout, a column per feature net; notes on stderr."""
    nets = [result, *result.get("also", [])]
    for name in ("fid", "sfid", "precision", "recall", "floor"):
        if name in result:
            values = ["--" if net[name] is None else f"{net[name]:.4f}" for net in nets]
            print(f"{name.replace('fid', 'FID'):<10}", *(f"{value:>10}" for value in values))
    if "spectrum" in result:
        print("spectrum  ", *(f"{ratio:10.2f}" for ratio in result["spectrum"]), "  of the reference's, coarse to fine")
    counts = ["?" if n is None else n for n in (result["reference_images"], result["sample_images"])]
    print("images     {} reference, {} samples".format(*counts))
    print(f"features   {', '.join(net['features'] for net in nets)}, {result['evaluator']} evaluator")
    for note in dict.fromkeys(note for net in nets for note in net["notes"]):
        print(f"note: {note}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
