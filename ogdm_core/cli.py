"""Command lines of our own: a parser, types of flags, errors in one line. Standard library only."""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .grids import grid_option
from .nfe import steps_for_nfe


class Parser(argparse.ArgumentParser):
    """Takes flags by their full names; an error is one line, without the whole usage."""

    def __init__(self, **options: Any):
        plain = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=plain, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nsee {self.prog} --help\n")


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """The type of a flag whose value is in [low, high), and finite."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value < high and value > -math.inf):
            what = "a whole number" if kind is int else "a number"
            least = f" >= {low}" if low > -math.inf else ""
            bound = f" in [{low}, {high})" if high < math.inf else least
            raise argparse.ArgumentTypeError(f"{text} is not allowed; give {what}{bound}")
        return value

    return parse


def numbers(kind: type, low: float, high: float = math.inf) -> Callable[[str], list[float]]:
    """The type of a flag with several such values, 0,1,2, none of them twice."""
    one = number(kind, low, high)

    def parse(text: str) -> list[float]:
        found = [one(part) for part in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text} is not allowed; name each once")
        return found

    return parse


def cells(text: str) -> list[tuple[str, int]]:
    """The type of a flag with samplers and NFEs, euler-5,s-pndm-10."""
    pairs = [cell.rpartition("-")[::2] for cell in text.split(",")]
    try:
        found = [(sampler, int(nfe)) for sampler, nfe in pairs]
        for sampler, nfe in found:
            steps_for_nfe(sampler, nfe)
    except ValueError as error:
        words = f"{text!r}: {error}; give SAMPLER-NFE[,...], such as euler-5,s-pndm-10"
        raise argparse.ArgumentTypeError(words) from None
    return found


def typed(parse: Callable[[Any], Any], refused: type[Exception] = argparse.ArgumentTypeError) -> Callable[[Any], Any]:
    """`parse` as the type of a flag: its ValueError becomes the exception that argparse, or click, prints."""

    def convert(text: Any) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise refused(str(error)) from error

    return convert


time_grid = typed(grid_option)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Around a command's checks: what its user can mend ends the program, with status 2.

    Around the work itself it would hide where a fault of ours lies.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def bar_interval() -> float:
    """Seconds between two updates of a progress bar: tqdm's own on a terminal, a minute in a log."""
    return 0.1 if sys.stderr.isatty() else 60.0
