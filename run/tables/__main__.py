"""`python -m run.tables NUMBER`: what run/reproduce_table1.sh and its kind call."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from rich.console import Console

from run.provenance import ROOT

from . import check, paper
from .engine import Busy, Engine, dry_run
from .experiments import Builder, Experiment, Options, select_rows
from .progress import Watch, duration
from .render import failures, to_terminal, write_all
from .results import collect
from .stages import chain

REPRODUCED = (1, 2, 3, 9)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m run.tables",
        description="Reproduces a table of the paper: data, training, sampling, evaluation, with "
        "the backbones' native commands. Can be stopped and started again.",
    )
    p.add_argument("number", type=int, choices=REPRODUCED, help="the table")
    what = p.add_argument_group("what")
    what.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help="rows by name or glob, as in 'cifar10-edm-*' (default: all; --list shows them)",
    )
    what.add_argument(
        "--nfes", default="", metavar="N[,N]", help="network evaluations (default: the table's)"
    )
    what.add_argument(
        "--images",
        type=int,
        default=0,
        metavar="N",
        help="samples a cell (default: 50000; 16 in a smoke run)",
    )
    what.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="ROW=PATH",
        help="weights to sample from instead of training the row; fine-tunes of a baseline that is "
        "given start from them",
    )
    what.add_argument(
        "--scale",
        choices=("paper", "smoke"),
        default="paper",
        help="smoke: tiny networks on a few digits, on a CPU, to see that all commands run",
    )
    what.add_argument(
        "--seed", type=int, default=0, help="of training (EDM, LDM) and sampling (default: 0)"
    )
    how = p.add_argument_group("where and how")
    how.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="processes a command, one a GPU (default: 1)",
    )
    how.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="stages at a time (default: 1; in a smoke run one a core, at most 4)",
    )
    how.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="results (default: out/tables, or out/tables-smoke)",
    )
    how.add_argument(
        "--data",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="archives of the data sets; prepared ones go there too (default: data)",
    )
    how.add_argument(
        "--third-party",
        type=Path,
        default=ROOT / "third_party",
        metavar="DIR",
        help="the patched codebases (default: third_party)",
    )
    how.add_argument("--weights", default="", metavar="FILE", help="Inception's weights")
    how.add_argument(
        "--features", default="", metavar="MODULE:NAME", help="another feature net than Inception"
    )
    how.add_argument(
        "--evaluator",
        choices=("torch", "adm"),
        default="torch",
        help="ours, or guided-diffusion's own (default: torch)",
    )
    only = p.add_argument_group("look, run nothing")
    only.add_argument("--list", action="store_true", help="the table's rows and NFEs")
    only.add_argument("--dry-run", action="store_true", help="every command in full")
    only.add_argument(
        "--plan",
        action="store_true",
        help="images, evaluations, disk, and hours from a few steps measured on this machine",
    )
    return p


def options_from(args: argparse.Namespace) -> Options:
    """Checked as far as syntax goes; raises ValueError."""
    smoke = args.scale == "smoke"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = args.jobs or (min(cores, 4) if smoke else 1)
    out = args.out or Path("out") / ("tables-smoke" if smoke else "tables")
    return Options(
        number=args.number,
        rows=tuple(name for text in args.rows for name in text.split(",") if name),
        nfes=tuple(_integers("--nfes", args.nfes)),
        gpus=args.gpus,
        images=args.images,
        checkpoints=tuple(_pair(text) for text in args.checkpoint),
        smoke=smoke,
        out=out.absolute(),
        data=args.data.absolute(),
        third_party=args.third_party.absolute(),
        weights=str(Path(args.weights).absolute()) if args.weights else "",
        features=args.features,
        evaluator=args.evaluator,
        seed=args.seed,
        jobs=jobs,
        threads=max(1, cores // jobs) if smoke else 0,
    )


def _integers(flag: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is no list of whole numbers, as in 10,20") from None
    if any(value < 1 for value in values):
        raise ValueError(f"{flag}: give numbers from 1 on, not {text!r}")
    return sorted(set(values), reverse=True)


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--checkpoint: {text!r} is not ROW=PATH")
    url = path.startswith(("http://", "https://"))
    return name, path if url else str(Path(path).absolute())


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all done, 1 some rows stopped, 2 nothing was started, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    p = parser()
    args = p.parse_args(argv)
    # Where no terminal sets a limit, a table gets the width it needs.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        options = options_from(args)
    except ValueError as error:
        p.error(str(error))
    table = paper.table(options.number)
    if args.list:
        for name in table.names:
            nfes = [str(row.nfe) for row in table.select(name) if row.fid is not None]
            console.print(f"{name}  {table.select(name)[0].sampler}, NFE {', '.join(nfes)}",
                          highlight=False, soft_wrap=True)  # fmt: skip
        return 0
    problems = check.problems(options)
    names, wrong_rows = select_rows(table, options.rows)
    if wrong_rows or (problems and not (args.dry_run or args.plan)):
        err.print(f"Nothing was started. {len(problems)} to put right:")
        for problem in problems:
            err.print(f"  - {problem}", markup=False)
        return 2
    builder = Builder(options)
    experiments = [builder.experiment(name) for name in names]
    if args.dry_run or args.plan:
        if args.plan:
            from .plan import print_plan

            print_plan(options, experiments, console)
        else:
            stages = chain(stage for e in experiments for stage in e.stages)
            print("\n".join(dry_run(stages)))
        if problems:
            err.print("\nBefore this can run:")
            for problem in problems:
                err.print(f"  - {problem}", markup=False)
        return 0
    command = shlex.join([f"run/reproduce_table{options.number}.sh", *argv[1:]])
    return run(options, experiments, command, console, err)


def run(
    options: Options, experiments: list[Experiment], command: str, console: Console, err: Console
) -> int:
    """Runs the rows and writes the table, also when it was stopped."""
    engine = Engine({e.name: e.stages for e in experiments}, options.work, options.jobs)
    engine.look()
    todo = len(engine.open())
    err.print(
        f"{len(experiments)} rows, {len(engine.stages)} stages, {todo} to do; in {options.out}"
    )
    status = 0
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as a cluster ends a job: like Ctrl-C
    try:
        with Watch(engine, err) as watch:
            engine.run(watch.tell, watch.tick)
    except Busy as busy:
        err.print(f"error: {busy}")
        return 2
    except KeyboardInterrupt:
        err.print("stopped; all that is done is kept, and the same command continues")
        status = 130
    table = paper.table(options.number)
    results = collect(table, options, experiments, engine, command)
    files = write_all(results, options.out)
    console.print(to_terminal(results))
    for line in failures(results):
        err.print(line, markup=False)
        status = status or 1
    fresh = [o for o in engine.outcomes.values() if o.fresh]
    spent = sum(outcome.seconds for outcome in fresh)
    err.print(f"{len(fresh)} stages done now, in {duration(spent)} of work; "
              f"{files[0].with_suffix('')}.{{json,csv,md,tex,png}}")  # fmt: skip
    return status


if __name__ == "__main__":
    sys.exit(main())
