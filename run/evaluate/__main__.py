"""FID, precision and recall (k = 3) of samples against a reference.

Each of the two is an npz of images (arr_0: uint8, [N, H, W, C], as the samplers write it), a folder
of images, or an npz of saved statistics (mu, sigma). ADM's reference batches are read, too. The
same command continues a run that was stopped. docs/evaluation.md has more.
"""

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ogdm_core.cli import Parser, number
from ogdm_core.files import check_writable, write_json
from ogdm_core.nfe import DISCRETISATIONS, steps_for_nfe
from run.provenance import commit, versions

PACKAGES = ("torch", "numpy", "torch-fidelity", "ogdm")
TORCH_ONLY = ("features", "batch", "device", "pr_images", "seed", "save_statistics")
# flags of a model, and their defaults
OF_MODEL = {"sampler": "euler", "nfe": 10, "discretisation": None, "count": 50_000}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = Parser(prog="run/evaluate.sh", description=__doc__)
    add = p.add_argument
    add("reference", type=Path, help="training images, ADM's reference batch, statistics")
    add("samples", type=Path, help="what a sampler wrote; or a model in diffusers' format, to draw")
    add("--sampler", help="of a model: euler (default), heun, s-pndm, ...")
    add("--nfe", type=number(int, 1), help="of a model: network evaluations (default: 10)")
    add("--discretisation", choices=DISCRETISATIONS,
        help="of a model: time grid (default: its own)")  # fmt: skip
    add("--count", type=number(int, 4), metavar="N",
        help="of a model: images to draw (default: 50,000)")  # fmt: skip
    add("--evaluator", choices=("torch", "adm"), default="torch",
        help="torch: ours, on a GPU or a CPU (default); adm: guided-diffusion's own, which also "
        "gives sFID and the Inception score; it gets an environment with TensorFlow, which is made "
        "once")  # fmt: skip
    add("--weights", type=Path, metavar="FILE",
        help="torch: torch-fidelity's Inception weights; adm: classify_image_graph_def.pb "
        "(without it, upstream downloads the file)")  # fmt: skip
    add("--features", metavar="NET",
        help="another feature net: MODULE:NAME, a callable on the import path that turns uint8 "
        "[N, 3, H, W] into [N, D]; the quickstart's classifier, FILE.pt; or pixels")  # fmt: skip
    add("--batch", type=number(int, 1), default=64, metavar="N",
        help="images at once (default: %(default)s)")  # fmt: skip
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--cache", type=Path, default=Path("out/evaluation-cache"), metavar="DIR",
        help="keeps the reference's features and unfinished work "
        "(default: %(default)s)")  # fmt: skip
    add("--no-cache", action="store_true", help="keep nothing")
    add("--pr-images", type=number(int, 4), default=50_000, metavar="N",
        help="precision and recall use at most N images of a set (default: %(default)s, the "
        "paper's)")  # fmt: skip
    add("--seed", type=number(int, 0, 2**63), default=0, metavar="N",
        help="draws those N (default: %(default)s)")  # fmt: skip
    add("--save-statistics", type=Path, metavar="NPZ", help="write the reference's, to be used as "
        "a REFERENCE later")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the numbers, the command, "
        "versions and the commit")  # fmt: skip
    return p


def main(argv: list[str] | None = None) -> int:
    """Prints the numbers; exits with 2 and the reason for what the user can mend."""
    p = parser()
    args = p.parse_args(argv)
    from run.sampling import draw_images

    from . import adm, torch_evaluator
    from .sources import open_source, planned

    started = time.time()
    evaluator = adm if args.evaluator == "adm" else torch_evaluator
    model = (args.samples / "unet").is_dir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for file in filter(None, (args.json, args.save_statistics)):
                check_writable(file)
            _check_flags(p, args, model)
            reference = open_source(args.reference)
            samples = planned(args.samples, args.count) if model else open_source(args.samples)
            evaluator.check(reference, samples, args)
            if model:
                file = Path(folder, f"{args.sampler}-{args.nfe}.npz")
                draw_images(str(args.samples), file, args.count, args.sampler, args.nfe, args.seed,
                            args.discretisation)  # fmt: skip
                samples = open_source(file)
            found = evaluator.evaluate(reference, samples, args)
    except (ValueError, OSError) as error:
        p.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        p.exit(130, "stopped; the same command goes on from the features that are stored; "
               "a model's samples are drawn again\n")  # fmt: skip
    result = found | {
        "evaluator": args.evaluator,
        "reference": str(args.reference),
        "samples": str(args.samples),
        "sampling": {n: getattr(args, n) for n in (*OF_MODEL, "seed")} if model else None,
        "command": shlex.join(["python", "-m", "run.evaluate", *(argv or sys.argv[1:])]),
        "versions": versions(PACKAGES) | found.get("versions", {}),
        "commit": commit(),
        "seconds": round(time.time() - started, 1),
    }
    show(result)
    if args.json:
        try:
            write_json(args.json, result)
        except OSError as error:
            p.exit(2, f"error: the numbers above could not be written to {args.json}: {error}\n")
    return 0


def show(result: dict[str, Any]) -> None:
    """Prints the numbers as a small table on stdout, notes on stderr."""
    for name in ("fid", "sfid", "precision", "recall"):
        if name in result:
            value = "--" if result[name] is None else f"{result[name]:.4f}"
            print(f"{name.replace('fid', 'FID'):<10} {value:>10}")
    counts = [result[f"{name}_images"] for name in ("reference", "sample")]
    print("images     {} reference, {} samples".format(*("?" if n is None else n for n in counts)))
    print(f"features   {result['features']}, {result['evaluator']} evaluator")
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)


def _check_flags(p: argparse.ArgumentParser, args: argparse.Namespace, model: bool) -> None:
    """Refuses flags that do not go together; fills in those of a model that is sampled."""
    given = [name for name in OF_MODEL if getattr(args, name) is not None]
    if given and not model:
        raise ValueError(f"--{given[0]} is for a model; {args.samples} holds no unet/")
    if model:
        vars(args).update({n: getattr(args, n) or default for n, default in OF_MODEL.items()})
        steps_for_nfe(args.sampler, args.nfe)
    given = [n for n in TORCH_ONLY if getattr(args, n) != p.get_default(n)]
    given = [n for n in given if not (model and n == "seed")]  # the samples' seed
    if args.evaluator == "adm" and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--evaluator adm does not know {flags}: leave out, or --evaluator torch")


if __name__ == "__main__":
    sys.exit(main())
