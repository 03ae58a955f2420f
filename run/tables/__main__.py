"""`python -m run.tables NUMBER`, which run/reproduce_table1.sh and the others call."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from run.launch import Engine, absolute
from run.provenance import cores

from . import check, paper, plan, table
from .flags import ASSEMBLED, parse, portable
from .jobs import chain
from .rows import Options, Planner, Row, no_rows, select_rows
from .scale import get_scale
from .workflow import workflow


def options_from(args: argparse.Namespace) -> Options:
    """What was asked for, with the scale's defaults."""
    scale = get_scale(args.scale)
    jobs = args.jobs or (min(cores(), 4) if scale.small else 1)
    threads = max(1, cores() // jobs) if scale.small else 0
    return Options(
        number=args.number,
        rows=tuple(name for text in args.rows for name in text.split(",") if name),
        nfes=tuple(sorted(args.nfes, reverse=True)), images=args.images or 0,
        checkpoints=tuple(args.checkpoint), sets=tuple(args.set),
        scale=scale, from_scratch=args.from_scratch, out=out_of(args).absolute(), data=args.data.absolute(),
        weights=absolute(args.weights), features=args.features, evaluator=args.evaluator,
        seeds=tuple(sorted(args.seeds)) or scale.seeds, jobs=jobs, slurm=args.slurm, time_limit=args.time_limit or 0,
        engine=Engine(args.gpus, args.nodes, "", args.third_party.absolute(), threads),
    )  # fmt: skip


def out_of(args: argparse.Namespace) -> Path:
    """--out, or the scale's own folder."""
    return args.out or Path("out") / ("tables" if args.scale == "paper" else f"tables-{args.scale}")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all done, 1 some rows stopped, 2 nothing was started, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    typed = shlex.join([f"run/reproduce_table{args.number}.sh", *argv[1:]])
    try:
        if args.number in ASSEMBLED:
            return assemble(args, typed, out_of(args))
        return command(args, typed)
    except KeyboardInterrupt:
        _say("stopped; the same command continues")
        return 130
    except OSError as error:
        _say(f"error: {error}")
        return 1


def command(args: argparse.Namespace, typed: str) -> int:
    """Runs one table. `typed` is the user's command line, which the result files record."""
    options = options_from(args)
    layout = options.table
    if args.list:
        if not layout.names:
            print(no_rows(options.number))
        for name in layout.names:
            cells = layout.select(name)
            there = [c for c in cells if c.fid is not None or options.scale.controls or layout.ours]
            print(f"{name}  {cells[0].sampler}, NFE {', '.join(str(c.nfe) for c in there)}")
        return 0
    wrong_rows = select_rows(layout, options.rows)[1]
    rows = Planner(options).rows()
    problems = wrong_rows + check.problems(options, rows)
    looking = args.dry_run or args.plan or args.table
    if wrong_rows or (problems and not looking):
        _say(f"Nothing was started. {len(problems)} to put right:")
        _say(*(f"  - {problem}" for problem in problems))
        return 2
    if args.table:
        write_table(options, rows, typed, args)
        return 0
    if args.plan:
        plan.print_plan(options, rows)
    if args.dry_run:
        for job in chain(job for row in rows for job in row.scores.values()):
            print(f"# {job.name}{' (done)' if job.record() else ''}")
            try:
                print(job.command() or "# nothing is to be done")
            except ValueError as error:
                print(f"# error: {error}")
    if looking:
        if problems:
            _say("\nBefore this can run:", *(f"  - {problem}" for problem in problems))
        return 0
    status = run(options, rows, args.native)
    write_table(options, rows, typed, args)
    return status


def run(options: Options, rows: list[Row], native: list[str]) -> int:
    """Does what is still to be done for these rows; returns Snakemake's exit status."""
    if options.engine.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(options.engine.threads))
    goals = [job for row in rows for job in row.scores.values()]
    return workflow(goals, options.out, f"table{options.number}", plan.resources(options), native,
                    options.slurm, options.jobs)  # fmt: skip


def write_table(options: Options, rows: list[Row], typed: str, args: argparse.Namespace) -> None:
    """Writes the table's files from what is there, and prints it."""
    results = table.collect(options, rows, typed) | {"portable": shlex.join(portable(args))}
    shown = [*table.best_lines(results), *table.lines(results), table.legend(results), "", *table.further(results)]
    print(results["title"], *shown, sep="\n", flush=True)
    files = table.write_all(results, options.out)
    _say(*table.failures(results), f"{files[0].with_suffix('')}.{{json,csv,md,png}}")


def assemble(args: argparse.Namespace, typed: str, out: Path) -> int:
    """Tables 4 and 8. Exit status 0 also where numbers are missing."""
    number = args.number
    if args.list:
        for name in paper.table(number).names:
            sources = [table.source(cell, number) for cell in paper.table(number).select(name)]
            repeated = [f"Table {s[0]}: {s[1]}" for s in dict.fromkeys(sources) if s]
            print(name, *repeated, sep="\n  ")
        return 0
    words = ["--out", str(args.out)] * bool(args.out)
    words += ["--scale", args.scale] * (args.scale != "paper")
    results = table.assemble(number, out.absolute(), args.scale, typed)
    missing = table.missing(results, words)
    if args.dry_run:
        print(*missing, sep="\n")
        return 0
    results["notes"] += missing
    files = table.write_all(results, out)
    print(results["title"], *table.lines(results), *results["notes"], sep="\n")
    print(f"{files[0].with_suffix('')}.{{json,csv,md,png}}")
    return 0


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
