"""The command lines of run/reproduce_table1.sh and the others. Standard library only."""

# ruff: noqa: E501 (aligned columns)

import argparse
from pathlib import Path

from ogdm_core.cli import Parser, number, numbers
from run.launch import absolute
from run.provenance import ROOT

from .scale import NAMES

REPRODUCED = (1, 2, 3, 7, 9, 10)
ASSEMBLED = (4, 8)  # from the others' results
# The flags that say what was run; the others say where.
PORTABLE = ("rows", "nfes", "images", "scale", "seeds", "from_scratch", "features", "evaluator")


# fmt: off
def parser(table: str = "N") -> argparse.ArgumentParser:
    """The command line of Table `table`."""
    prog = f"run/reproduce_table{table}.sh"
    p = Parser(
        prog=prog, usage="%(prog)s [OPTION...] [-- SNAKEMAKE OPTION...]",
        description=DESCRIPTION, epilog=EPILOG,
    )
    p.add_argument("number", type=int, choices=REPRODUCED, help=argparse.SUPPRESS)
    add = p.add_argument_group("what").add_argument
    add("--rows",        metavar="NAME[,NAME]", action="append", default=[], help="rows by name or glob, as in 'cifar10-edm-*' (default: all; --list shows them)")
    add("--nfes",        metavar="N[,N]", type=numbers(int, 1), default=(), help="network evaluations, as in 10,20 (default: the table's)")
    add("--images",      metavar="N", type=number(int, 4), help="samples per cell, 4 or more: recall looks at three neighbours (default: 50000; 2500 at cpu and cpu-mnist, 5000 at cpu-cifar10, 16 in a smoke run)")
    add("--checkpoint",  metavar="ROW=PATH", type=checkpoint, action="append", default=[], help="weights to sample in place of training the row; fine-tunes of a baseline that is given start from them")
    add("--set",         metavar="ROW:--FLAG=VALUE", type=native_flag, action="append", default=[], help="a native flag of a row's training (ROW by name or glob), as in 'cifar10-adm-*:--num_heads=4', and of its sampling where that has the flag too; ROW:sample:--FLAG=VALUE of its sampling alone")
    add("--scale",       choices=NAMES, default="paper", help="cpu: fine-tunes of small networks on digits and their controls, on a CPU, half an hour; cpu-mnist: the same on MNIST, longer; cpu-cifar10: on CIFAR-10 at 16x16, hours, and cpu-cifar10-32 on its whole images, longer; smoke: tiny networks, a few steps, to see that all commands run (default: paper)")
    add("--seeds",       "--seed", metavar="N[,N]", type=numbers(int, 0), default=(), help="random seeds for sampling, for training on EDM and LDM, and for D at the cpu scales; with several seeds the table shows mean and standard deviation (default: 0; 0,1,2 at the cpu scales). Baselines are trained by the first seed")
    add("--from-scratch", action="store_true", help="cpu scales: train the baselines, too, in place of the shipped ones")
    add = p.add_argument_group("where and how").add_argument
    add("--gpus",        metavar="N", type=number(int, 1), default=1, help="processes per command, one per GPU (default: 1)")
    add("--nodes",       metavar="N", type=number(int, 1), default=1, help="machines per command, with --slurm (default: 1)")
    add("--jobs",        metavar="N", type=number(int, 1), help="commands at a time (default: 1; at the smoke and cpu scales one per core, at most 4)")
    add("--slurm",       action="store_true", help="submit the jobs to Slurm: short for -- --profile run/tables/slurm; say the partition after --")
    add("--time-limit",  metavar="MINUTES", type=number(int, 1), help="longest time of a job, which Slurm is told (default: by kind, as in 10080 for a training and 1440 for sampling)")
    add("--out",         metavar="DIR", type=Path, help="results (default: out/tables, or out/tables-SCALE)")
    add("--data",        metavar="DIR", type=Path, default=Path("data"), help="archives of the data sets; prepared ones go there too (default: data)")
    add("--third-party", metavar="DIR", type=Path, default=ROOT / "third_party", help="the patched codebases (default: third_party)")
    add("--weights",     metavar="FILE", default="", help="Inception's weights")
    add("--features",    metavar="NET[,NET]", default="", help="other feature nets than Inception, as in lite0 or MODULE:NAME; the table has the first, and its .md and .json the others, too")
    add("--evaluator",   choices=("torch", "adm"), default="torch", help="ours, or guided-diffusion's own (default: torch)")
    add = p.add_argument_group("look, run nothing").add_argument
    add("--list",        action="store_true", help="the table's rows and NFEs")
    add("--dry-run",     action="store_true", help="every native command in full")
    add("--plan",        action="store_true", help="images, evaluations, disk; what --checkpoint would save")
    add("--table",       action="store_true", help="write the table from what is there now, also while a run goes on")
    return p


def assembled_parser(table: str) -> argparse.ArgumentParser:
    """The command line of Tables 4 and 8."""
    p = Parser(prog=f"run/reproduce_table{table}.sh", usage="%(prog)s [OPTION...]", description=DESCRIPTION)
    add = p.add_argument
    add("number",    type=int, choices=ASSEMBLED, help=argparse.SUPPRESS)
    add("--out",     metavar="DIR", type=Path, help="where the tables are (default: out/tables)")
    add("--scale",   choices=("paper", "smoke"), default="paper", help="smoke: of smoke runs (default: paper)")
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
  run/reproduce_table10.sh   not in the paper: EDM2 and SiT, at --scale smoke, cpu and cpu-mnist

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
    """The command line, of any table; ends the program where it is wrong."""
    cut = argv.index("--") if "--" in argv else len(argv)
    if argv and argv[0] in map(str, ASSEMBLED):
        return assembled_parser(argv[0]).parse_args(argv)
    args = parser(*argv[:1]).parse_args(argv[:cut])
    args.native = argv[cut + 1 :]
    return args


def portable(args: argparse.Namespace) -> list[str]:
    """The words of a command that makes the same table on any machine; given checkpoints are named without folders."""
    words = [f"run/reproduce_table{args.number}.sh"]
    for name in PORTABLE:
        value = getattr(args, name)
        if value and value != parser().get_default(name):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    for row, path in args.checkpoint:
        words += ["--checkpoint", f"{row}={Path(path).name}"]
    for row, kind, flag, value in args.set:
        words += ["--set", f"{row}:{'sample:' if kind == 'sample' else ''}{flag}={value}"]
    return words
