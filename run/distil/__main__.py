"""Distils every fine-tune of a quickstart into a student that samples in one or two steps: which is
the better teacher, the control or OGDM?

    run/quickstart.sh --data digits --seeds 0,1,2 --out out/quickstart-digits
    run/distil.sh out/quickstart-digits --output out/distil

Prints FID and recall by teacher, and writes the students, results.json and distil.png to OUTPUT.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from ogdm_core.cli import Parser, errors_in_one_line, number


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags."""
    p = Parser(prog="run/distil.sh", description=__doc__)
    add = p.add_argument
    add("quickstart", type=Path, help="the folder that run/quickstart.sh wrote")
    add("--output", type=Path, default=Path("out/distil"),
        help="folder to write (default: out/distil)")  # fmt: skip
    add("--data", choices=("digits", "mnist"), default="digits",
        help="what the fine-tunes were trained on (default: digits)")  # fmt: skip
    add("--steps", type=number(int, 1), default=500, help="per student (default: 500)")
    add("--grid", type=number(int, 2, 1000), default=18,
        help="Euler steps of the teacher from T to 0 (default: 18)")  # fmt: skip
    add("--samples", type=number(int, 100), default=1500, help="per student (default: 1500)")
    return p.parse_args(argv)


def plot(rows: list[dict[str, Any]], path: Path, command: str) -> None:
    """FID by number of steps and teacher: bars for the means, points for the seeds."""
    from run.figures import style

    fig, ax = style.figure(size=(4.6, 2.8))
    for i, (method, name) in enumerate((("control", "control"), ("ogdm", "OGDM"))):
        for nfe in (1, 2):
            fids = [r["fid"] for r in rows if (r["method"], r["nfe"]) == (method, nfe)]
            at, colour = nfe + 0.36 * i - 0.18, style.method_colour(method)
            label = name if nfe == 1 else None
            ax.bar(at, sum(fids) / max(len(fids), 1), 0.34, color=colour, alpha=0.6, label=label)
            ax.scatter([at] * len(fids), fids, s=12, color=style.ORANGE, zorder=3)
    ax.set_xticks([1, 2], ["1 step", "2 steps"])
    ax.set_ylabel("student's FID (lower is better)")
    ax.legend(fontsize=8, title="teacher")
    fig.tight_layout(rect=(0, 0.03, 1, 1))
    style.save(fig, path, command)


def main(argv: list[str] | None = None) -> int:
    """Distils and scores every fine-tune; results.json grows with them."""
    argv = sys.argv[1:] if argv is None else argv
    args, command = parse(argv), shlex.join(["run/distil.sh", *argv])
    with errors_in_one_line():
        import torch

        from ogdm_core.files import check_writable, write_json
        from ogdm_core.images import load
        from run.distil.fine_tunes import fine_tunes, table
        from run.distil.student import distil, draw
        from run.evaluate import metrics
        from run.evaluate.classifier import load_classifier
        from run.provenance import commit
        from run.sampling import Model

        runs, features = fine_tunes(args.quickstart, args.data)
        check_writable(args.output / "results.json")
        images = load(args.data)
        classifier, _ = load_classifier(features, images)
        teachers = {run: Model(str(run)) for run in runs}
    result = {"command": command, "commit": commit(), "rows": []}
    torch.set_num_threads(1)  # the same result on any number of cores, and as fast
    real = classifier.features(images.all())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((args.samples, *images.shape), generator=generator)
    for run, (method, seed) in runs.items():
        name, folder = f"{method}, seed {seed}", args.output / run.name
        student = distil(teachers[run], images, args.steps, args.grid, seed, f"{name}: step")
        student.unet.save_pretrained(folder / "unet")
        shutil.copytree(run / "scheduler", folder / "scheduler", dirs_exist_ok=True)
        for nfe in (1, 2):
            fake = classifier.features(draw(student, noise, args.grid, nfe))
            fid, (_, recall) = metrics.fid(real, fake), metrics.precision_recall(real, fake)
            result["rows"].append({
                "run": run.name, "method": method, "seed": seed, "sampler": "consistency",
                "nfe": nfe, "cost": nfe, "weight": 0.0, "fid": fid, "recall": recall,
            })  # fmt: skip
            print(f"{name}, NFE {nfe}: FID {fid:.3f}, recall {recall:.3f}", flush=True)
        write_json(args.output / "results.json", result)
    print(table(result["rows"]))
    plot(result["rows"], args.output / "distil.png", command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
