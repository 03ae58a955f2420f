"""What `run/prepare_data.sh` runs."""

from ogdm_core.cli import errors_in_one_line

from . import celeba, cifar10, folder, lsun, lsun_reference
from .flags import parse

DATASETS = {"celeba": celeba, "cifar10": cifar10, "folder": folder, "lsun": lsun, "lsun-reference": lsun_reference}


@errors_in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Prepares one data set; a source that cannot be read ends the program with one line."""
    args = parse(argv)
    DATASETS[args.name].run(args)


if __name__ == "__main__":
    main()
