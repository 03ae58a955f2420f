"""Turns a data set's archive into the folder of images that the trainers read.

Can be stopped and started again; counts the images at the end.
"""

import argparse
from pathlib import Path

from ogdm_core.cli import Parser, errors_in_one_line

from . import celeba, cifar10, lsun, lsun_reference

DATASETS = {"celeba": celeba, "cifar10": cifar10, "lsun": lsun, "lsun-reference": lsun_reference}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags of one data set, all of which take SOURCE and FOLDER."""
    p = Parser(prog="run/prepare_data.sh", description=__doc__)
    names = p.add_subparsers(dest="name", required=True, metavar="|".join(DATASETS))
    for name, module in DATASETS.items():
        add = names.add_parser(name, description=module.__doc__).add_argument
        add("source", type=Path, help=module.SOURCE)
        add("folder", type=Path, help="where the images go")
        module.arguments(add)
    return p.parse_args(argv)


@errors_in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Prepares one data set; a source that cannot be read ends the program with one line."""
    args = parse(argv)
    DATASETS[args.name].run(args)


if __name__ == "__main__":
    main()
