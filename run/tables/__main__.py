"""`python -m run.tables NUMBER`, which run/reproduce_table1.sh and the others call."""

# ruff: noqa: E501 (aligned columns)

import argparse
import os
import shlex
import sys
from pathlib import Path

from ogdm_core.cli import Parser, number, numbers
from run.provenance import ROOT, cores
from run.train.commands import Engine, absolute

# What these modules need beyond the standard library they import in functions: `parse` comes first.
from . import assembled, check, cost, table
from .jobs import chain
from .rows import Options, Planner, Row, select_rows
from .scale import NAMES, get_scale
from .workflow import workflow

REPRODUCED = (1, 2, 3, 7, 9)
ASSEMBLED = (4, 8)  # from the others' results


# fmt: off
def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = Parser(
        prog="run/reproduce_table.sh", usage="run/reproduce_tableN.sh [OPTION...] [-- SNAKEMAKE OPTION...]",
        description=DESCRIPTION, epilog=EPILOG,
    )
    p.add_argument("number", type=int, choices=REPRODUCED, help=argparse.SUPPRESS)
    add = p.add_argument_group("what").add_argument
    add("--rows",        metavar="NAME[,NAME]", action="append", default=[], help="rows by name or glob, as in 'cifar10-edm-*' (default: all; --list shows them)")
    add("--nfes",        metavar="N[,N]", type=numbers(int, 1), default=(), help="network evaluations, as in 10,20 (default: the table's)")
    add("--images",      metavar="N", type=number(int, 4), default=0, help="samples per cell, 4 or more: recall looks at three neighbours (default: 50000; 2500 at the cpu scales, 16 in a smoke run)")
    add("--checkpoint",  metavar="ROW=PATH", type=checkpoint, action="append", default=[], help="weights to sample in place of training the row; fine-tunes of a baseline that is given start from them")
    add("--set",         metavar="ROW:--FLAG=VALUE", type=native_flag, action="append", default=[], help="a native flag of a row's training (ROW by name or glob), as in 'cifar10-adm-*:--num_heads=4', and of its sampling where that has the flag too; ROW:sample:--FLAG=VALUE of its sampling alone")
    add("--scale",       choices=NAMES, default="paper", help="cpu: fine-tunes of small networks on digits and their controls, on a CPU, half an hour; cpu-mnist: the same on MNIST, longer; smoke: tiny networks, a few steps, to see that all commands run")
    add("--seeds",       "--seed", metavar="N[,N]", type=numbers(int, 0), default=(), help="of sampling, of training (EDM, LDM), and of OGDM at the cpu scales; several give mean and spread (default: 0; 0,1,2 at the cpu scales). Baselines are trained by the first one")
    add("--from-scratch", action="store_true", help="cpu scales: train the baselines, too, in place of the shipped ones")
    add = p.add_argument_group("where and how").add_argument
    add("--gpus",        metavar="N", type=number(int, 1), default=1, help="processes per command, one per GPU (default: 1)")
    add("--nodes",       metavar="N", type=number(int, 1), default=1, help="machines per command, with --slurm (default: 1)")
    add("--jobs",        metavar="N", type=number(int, 1), default=0, help="commands at a time (default: 1; at the smoke and cpu scales one per core, at most 4)")
    add("--slurm",       action="store_true", help="submit the jobs to Slurm: short for -- --profile run/tables/slurm; say the partition after --")
    add("--out",         metavar="DIR", type=Path, help="results (default: out/tables, out/tables-smoke, out/tables-cpu, out/tables-cpu-mnist)")
    add("--data",        metavar="DIR", type=Path, default=Path("data"), help="archives of the data sets; prepared ones go there too (default: data)")
    add("--third-party", metavar="DIR", type=Path, default=ROOT / "third_party", help="the patched codebases (default: third_party)")
    add("--weights",     metavar="FILE", default="", help="Inception's weights")
    add("--features",    metavar="MODULE:NAME", default="", help="another feature net than Inception")
    add("--evaluator",   choices=("torch", "adm"), default="torch", help="ours, or guided-diffusion's own (default: torch)")
    add = p.add_argument_group("look, run nothing").add_argument
    add("--list",        action="store_true", help="the table's rows and NFEs")
    add("--dry-run",     action="store_true", help="every native command in full")
    add("--plan",        action="store_true", help="images, evaluations, disk, and hours from a few steps timed on this machine; what --checkpoint would save")
    add("--table",       action="store_true", help="write the table from what is there now, also while a run goes on")
    return p


def assembled_parser() -> argparse.ArgumentParser:
    """The command line of Tables 4 and 8."""
    p = Parser(prog="run/reproduce_table.sh", usage="run/reproduce_tableN.sh [OPTION...]", description=DESCRIPTION)
    add = p.add_argument
    add("number",    type=int, choices=ASSEMBLED, help=argparse.SUPPRESS)
    add("--out",     metavar="DIR", type=Path, help="where the tables are (default: out/tables)")
    add("--scale",   choices=("paper", "smoke"), default="paper", help="smoke: of smoke runs")
    add("--list",    action="store_true", help="the table's rows, and the rows they repeat")
    add("--table",   action="store_true", help="what happens anyway: write the table")
    add("--dry-run", action="store_true", help="the commands that make what is missing, no table")
    return p


DESCRIPTION = """\
Reproduces a table of the paper: data, training, sampling, scores, by the backbones' own commands.

  run/reproduce_table1.sh    Euler's sampler, 12 rows on ADM, EDM and LDM
  run/reproduce_table2.sh    Heun's method, 2 rows on EDM
  run/reproduce_table3.sh    S-PNDM and F-PNDM, 16 rows on ADM, EDM and LDM
  run/reproduce_table4.sh    other methods, and the best of Tables 1 to 3
  run/reproduce_table7.sh    Heun's method and discriminator guidance, 4 rows on EDM
  run/reproduce_table8.sh    DDGAN, and the best of Tables 1 to 3
  run/reproduce_table9.sh    stochastic sampler, 4 rows on ADM

Writes the table with our numbers beside the paper's. Can be stopped at any time; the same command
continues. The jobs are a Snakemake workflow, on this machine or on a cluster (docs/clusters.md).
Tables 4 and 8 run nothing: they read the others' results in --out, and name what is missing."""
EPILOG = """\
examples:
  run/reproduce_table1.sh --scale cpu
  run/reproduce_table1.sh --rows cifar10-edm-ogdm-ft --gpus 8 --plan
  run/reproduce_table1.sh --slurm --gpus 8 -- --default-resources slurm_partition=gpu

Needs run/setup.sh once, for the codebases. docs/tables.md has more."""
# fmt: on


def checkpoint(text: str) -> tuple[str, str]:
    """(row, path or URL) of ROW=PATH."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROW=PATH")
    return name, absolute(path)


def native_flag(text: str) -> tuple[str, str, str, str]:
    """(row, train or sample, flag, value) of ROW:--FLAG=VALUE or ROW:sample:--FLAG=VALUE."""
    row, _, rest = text.partition(":")
    kind, rest = ("sample", rest[7:]) if rest.startswith("sample:") else ("train", rest)
    flag, equals, value = rest.partition("=")
    if not (row and flag and equals):
        words = f"{text!r} is not ROW:--FLAG=VALUE, as in 'cifar10-adm-*:--num_heads=4'"
        raise argparse.ArgumentTypeError(words)
    return row, kind, flag, value


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, of any table; ends the program where it is wrong. Needs no package."""
    cut = argv.index("--") if "--" in argv else len(argv)
    if argv and argv[0] in map(str, ASSEMBLED):
        return assembled_parser().parse_args(argv)
    args = parser().parse_args(argv[:cut])
    args.native = argv[cut + 1 :]
    return args


def options_from(args: argparse.Namespace) -> Options:
    """What was asked for, with the scale's defaults."""
    scale = get_scale(args.scale)
    jobs = args.jobs or (min(cores(), 4) if scale.small else 1)
    threads = max(1, cores() // jobs) if scale.small else 0
    return Options(
        number=args.number,
        rows=tuple(name for text in args.rows for name in text.split(",") if name),
        nfes=tuple(sorted(args.nfes, reverse=True)), images=args.images, checkpoints=tuple(args.checkpoint), sets=tuple(args.set),
        scale=scale, from_scratch=args.from_scratch, out=out_of(args).absolute(), data=args.data.absolute(),
        weights=absolute(args.weights), features=args.features, evaluator=args.evaluator,
        seeds=tuple(sorted(args.seeds)) or scale.seeds, jobs=jobs, slurm=args.slurm,
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
            return assembled.main(args, typed, out_of(args))
        return command(args, typed)
    except KeyboardInterrupt:
        _say("stopped; the same command continues")
        return 130
    except OSError as error:
        _say(f"error: {error}")
        return 1


def command(args: argparse.Namespace, typed: str) -> int:
    """What `main` does, where nothing comes between; the files name the command that was typed."""
    options = options_from(args)
    layout = options.table
    if args.list:
        if not layout.names:
            print(f"Table {options.number} has no rows at scale {options.scale.name}")
        for name in layout.names:
            cells = layout.select(name)
            there = [c for c in cells if c.fid is not None or options.scale.controls]
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
        write_table(options, rows, typed)
        return 0
    if args.plan:
        cost.print_plan(options, rows)
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
    write_table(options, rows, typed)
    return status


def run(options: Options, rows: list[Row], native: list[str]) -> int:
    """Does what is still to be done for these rows; returns Snakemake's exit status."""
    if options.engine.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(options.engine.threads))
    goals = [job for row in rows for job in row.scores.values()]
    return workflow(goals, options.out, f"table{options.number}", cost.resources(options), native,
                    options.slurm, options.jobs)  # fmt: skip


def write_table(options: Options, rows: list[Row], typed: str) -> None:
    """Writes the table's files from what is there, and prints it."""
    results = table.collect(options, rows, typed)
    print(results["title"], *table.lines(results), table.legend(results), sep="\n", flush=True)
    files = table.write_all(results, options.out)
    _say(*table.failures(results), f"{files[0].with_suffix('')}.{{json,csv,md,tex,png}}")


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
