"""`python -m run.tables NUMBER`, which run/reproduce_table1.sh and the others call."""

# ruff: noqa: E501 (aligned columns)

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from run.provenance import ROOT, cores

REPRODUCED = (1, 2, 3, 7, 9)
ASSEMBLED = (4, 8)  # from the others' results
HERE = Path(__file__).parent
SLURM = HERE / "slurm"  # Snakemake's profile


# fmt: off
def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="run/reproduce_table.sh", usage="run/reproduce_tableN.sh [OPTION...] [-- SNAKEMAKE OPTION...]",
        description="Reproduces a table of the paper: data, training, sampling, scores, with the backbones' native "
        "commands, as a Snakemake workflow. Can be stopped at any time; the same command continues.",
    )
    p.add_argument("number", type=int, choices=REPRODUCED, help=argparse.SUPPRESS)
    add = p.add_argument_group("what").add_argument
    add("--rows",        metavar="NAME[,NAME]", action="append", default=[], help="rows by name or glob, as in 'cifar10-edm-*' (default: all; --list shows them)")
    add("--nfes",        metavar="N[,N]", default="", help="network evaluations (default: the table's)")
    add("--images",      metavar="N", type=int, default=0, help="samples per cell (default: 50000; 16 in a smoke run)")
    add("--checkpoint",  metavar="ROW=PATH", action="append", default=[], help="weights to sample in place of training the row; fine-tunes of a baseline that is given start from them")
    add("--set",         metavar="ROW:--FLAG=VALUE", action="append", default=[], help="a native flag of a row's training (ROW by name or glob), and of its sampling where that has the flag too; ROW:sample:--FLAG=VALUE of its sampling alone")
    add("--scale",       choices=("paper", "smoke"), default="paper", help="smoke: tiny networks on a few digits, on a CPU, to see that all commands run")
    add("--seed",        metavar="N", type=int, default=0, help="of training (EDM, LDM) and sampling (default: 0)")
    add = p.add_argument_group("where and how").add_argument
    add("--gpus",        metavar="N", type=int, default=1, help="processes per command, one per GPU (default: 1)")
    add("--nodes",       metavar="N", type=int, default=1, help="machines per command, with --slurm (default: 1)")
    add("--jobs",        metavar="N", type=int, default=0, help="commands at a time (default: 1; in a smoke run one per core, at most 4)")
    add("--slurm",       action="store_true", help="submit the jobs to Slurm: short for -- --profile run/tables/slurm")
    add("--out",         metavar="DIR", type=Path, help="results (default: out/tables, or out/tables-smoke)")
    add("--data",        metavar="DIR", type=Path, default=Path("data"), help="archives of the data sets; prepared ones go there too (default: data)")
    add("--third-party", metavar="DIR", type=Path, default=ROOT / "third_party", help="the patched codebases (default: third_party)")
    add("--weights",     metavar="FILE", default="", help="Inception's weights")
    add("--features",    metavar="MODULE:NAME", default="", help="another feature net than Inception")
    add("--evaluator",   choices=("torch", "adm"), default="torch", help="ours, or guided-diffusion's own (default: torch)")
    add = p.add_argument_group("look, run nothing").add_argument
    add("--list",        action="store_true", help="the table's rows and NFEs")
    add("--dry-run",     action="store_true", help="every native command in full")
    add("--plan",        action="store_true", help="images, evaluations, disk, and hours from a few steps timed on this machine")
    add("--table",       action="store_true", help="write the table from what is there now, also while a run goes on")
    return p
# fmt: on


def options_from(args: argparse.Namespace):
    """Checked as far as syntax goes; raises ValueError."""
    nfes = _integers("--nfes", args.nfes)
    checkpoints = tuple(_pair(text) for text in args.checkpoint)
    sets = tuple(_set(text) for text in args.set)
    from run.train.commands import Engine

    from .jobs import Options

    smoke = args.scale == "smoke"
    jobs = args.jobs or (min(cores(), 4) if smoke else 1)
    threads = max(1, cores() // jobs) if smoke and jobs > 0 else 0
    out = args.out or Path("out") / ("tables-smoke" if smoke else "tables")
    return Options(
        number=args.number,
        rows=tuple(name for text in args.rows for name in text.split(",") if name),
        nfes=nfes, images=args.images, checkpoints=checkpoints, sets=sets, smoke=smoke, out=out.absolute(),
        data=args.data.absolute(), weights=str(Path(args.weights).absolute()) if args.weights else "",
        features=args.features, evaluator=args.evaluator, seed=args.seed, jobs=jobs, slurm=args.slurm,
        engine=Engine(args.gpus, args.nodes, "", args.third_party.absolute(), threads),
    )  # fmt: skip


def _integers(flag: str, text: str) -> tuple[int, ...]:
    try:
        values = {int(part) for part in text.split(",") if part.strip()}
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is no list of whole numbers, as in 10,20") from None
    if any(value < 1 for value in values):
        raise ValueError(f"{flag}: give numbers from 1 on, not {text!r}")
    return tuple(sorted(values, reverse=True))


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--checkpoint: {text!r} is not ROW=PATH")
    return name, path if path.startswith(("http://", "https://")) else str(Path(path).absolute())


def _set(text: str) -> tuple[str, str, str, str]:
    """(row, train or sample, flag, value) of ROW:--FLAG=VALUE or ROW:sample:--FLAG=VALUE."""
    row, _, rest = text.partition(":")
    kind, rest = ("sample", rest[7:]) if rest.startswith("sample:") else ("train", rest)
    flag, equals, value = rest.partition("=")
    if not (row and flag and equals):
        raise ValueError(f"--set: {text!r} is not ROW:--FLAG=VALUE, as in "
                         "'cifar10-adm-*:--num_heads=4'")  # fmt: skip
    return row, kind, flag, value


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all done, 1 some rows stopped, 2 nothing was started, 130 Ctrl-C."""
    try:
        return command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        _say("stopped; the same command continues")
        return 130
    except OSError as error:
        _say(f"error: {error}")
        return 1


def command(argv: list[str]) -> int:
    """What `main` does, where nothing comes between."""
    if argv and argv[0] in map(str, ASSEMBLED):
        from . import assembled

        return assembled.main(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    args, native = parser().parse_args(argv[:cut]), argv[cut + 1 :]
    try:
        options = options_from(args)
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    from . import check, cost, paper
    from .jobs import Planner, chain, select_rows

    table = paper.table(options.number)
    if args.list:
        for name in table.names:
            cells = table.select(name)
            nfes = [str(cell.nfe) for cell in cells if cell.fid is not None]
            print(f"{name}  {cells[0].sampler}, NFE {', '.join(nfes)}")
        return 0
    wrong_rows = select_rows(table, options.rows)[1]
    rows = Planner(options).rows()
    problems = wrong_rows + check.problems(options, rows)
    looking = args.dry_run or args.plan or args.table
    if wrong_rows or (problems and not looking):
        _say(f"Nothing was started. {len(problems)} to put right:")
        _say(*(f"  - {problem}" for problem in problems))
        return 2
    if args.table:
        write_table(options, rows, argv)
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
    status = run(options, rows, native)
    write_table(options, rows, argv)
    return status


def run(options, rows, native: list[str]) -> int:
    """Does what is still to be done for these rows; returns Snakemake's exit status."""
    from .cost import resources

    where = ["--profile", str(SLURM)] if options.slurm else ["--cores", str(options.jobs)]
    goals = [job for row in rows for job in row.scores.values()]
    name = f"table{options.number}"
    return workflow(goals, options.out, name, resources(options), [*where, *native])


def workflow(goals, out: Path, name: str, resources, native: list[str]) -> int:
    """Has Snakemake do what is still to be done for the jobs `goals`; returns its exit status.

    resources   what a scheduler is told about a job
    native      Snakemake's options: where, how many at a time
    """
    from .jobs import chain, write_plan

    pending, total = chain(goals, pending=True), len(chain(goals))
    _say(f"{len(goals)} results, {total} jobs, {len(pending)} to do; in {out}")
    if not pending:
        return 0
    for job in pending:
        job.marker.unlink(missing_ok=True)  # of an output that is gone
    plan = write_plan(out, name, pending, resources)
    command = [
        sys.executable, "-m", "snakemake", "--snakefile", str(HERE / "Snakefile"),
        "--directory", str(out), "--config", f"plan={plan}",
        # The keys in the folders' names say what is to be run again. Each job locks its own folder.
        "--rerun-triggers", "mtime", "--ignore-incomplete", "--nolock", "--keep-going",
        "--scheduler", "greedy", "--quiet", "host", "reason", *native,
    ]  # fmt: skip
    stopped, group = [], []

    def stop(*_: object) -> None:
        """Ctrl-C, or SIGTERM: ends snakemake and the running commands, once they are known.

        It raises nothing: an exception while snakemake is being started would lose its process.
        """
        stopped.append(True)
        while group:  # once: a second signal would interrupt a command that is about to end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pop(), signal.SIGINT)

    # Set before it starts: a shell that starts us in the background has SIGINT ignored, and a child
    # would inherit that.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, process_group=0)
        group.append(process.pid)
        if stopped:
            stop()
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        _say("stopped; all that is done is kept, and the same command continues")
        return 130
    return status


def write_table(options, rows, argv: list[str]) -> None:
    """Writes the table's files from what is there, and prints it."""
    from . import table

    command = shlex.join([f"run/reproduce_table{options.number}.sh", *argv[1:]])
    results = table.collect(options, rows, command)
    print(results["title"], *table.lines(results), sep="\n")
    print("FID / recall: ours, and the paper's in brackets", flush=True)
    files = table.write_all(results, options.out)
    _say(*table.failures(results), f"{files[0].with_suffix('')}.{{json,csv,md,tex,png}}")


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
