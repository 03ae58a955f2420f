"""Files that are programs: what `--trust` admits, and the gate before every torch.load.

`unpickle` reads pickles as data.
"""

import argparse
import contextlib
import os
import pickle
import tarfile
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

TRUST_HELP = "run the code that a pickle or a config brings; without it such files are refused"
GIVEN = ContextVar("--trust", default=False)  # whether files may bring code of their own


class RefusedError(pickle.UnpicklingError):
    """A file, or a config, that would run code of its own."""


class TrustFlag(argparse.Action):
    """`--trust` of an argparse parser. It leaves no trace in the namespace."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any):
        hidden = argparse.SUPPRESS
        super().__init__(option_strings, hidden, nargs=0, default=hidden, help=TRUST_HELP)

    def __call__(self, *args: Any) -> None:
        GIVEN.set(True)


def trust_option(command: Callable) -> Callable:
    """Adds `--trust` to a click command; its function does not see it."""
    import click

    def given(context: Any, parameter: Any, value: bool) -> None:
        if value:
            GIVEN.set(True)

    flag: Any = {"is_flag": True, "expose_value": False, "callback": given, "help": TRUST_HELP}
    return click.option("--trust", **flag)(command)


def refusal(what: str) -> RefusedError:
    """The error for a file or config that asks for `what`."""
    return RefusedError(
        f"{what} is none of upstream's or torch's own classes, so it may run any code; if you "
        "trust where it comes from, repeat with --trust"
    )


def load(f: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.load of a path or file that `refuse_archives` lets pass."""
    refuse_archives(f)
    return torch.load(f, *args, **kwargs)


def refuse_archives(f: Any) -> None:
    """Refuses archives that torch.load reads without its pickle module, unless --trust is given.

    TorchScript is compiled, and its code can write any file. The tar of torch 0.1 is unpacked.

    f   a path, or a file, whose position does not change
    """
    if GIVEN.get():
        return
    with contextlib.nullcontext(f) if hasattr(f, "seek") else open(f, "rb") as file:
        start, kind = file.tell(), ""
        zipped = file.read(4) == b"PK\3\4"  # torch's own test
        file.seek(start)
        if zipped:
            with contextlib.suppress(OSError, RuntimeError):  # a damaged archive, of which torch.load says more
                if "constants.pkl" in torch._C.PyTorchFileReader(file).get_all_records():  # torch's own test, too
                    kind = "a TorchScript archive"
        elif tarfile.is_tarfile(file):
            kind = "a tar archive"
        file.seek(start)
    if kind:
        name = getattr(f, "name", f if isinstance(f, str | os.PathLike) else "the file")
        raise RefusedError(f"{name} is {kind}, which may run any code; give a checkpoint that torch.save wrote")
