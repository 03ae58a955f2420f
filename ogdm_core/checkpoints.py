"""Files that may be damaged, be a program, or belong to another run: one answer for every backbone.

reading              names a file that cannot be read, and says what to do
Unpickler            admits tensors, arrays and containers, and refuses what would run code
compare              what differs between a saved run and this one
stop_if_not_finite   ends a run that diverged before it replaces a good checkpoint
"""

import argparse
import contextlib
import importlib
import io
import math
import os
import pickle
import types
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._weights_only_unpickler import _get_allowed_globals

from .distributed import rank

TRUST_HELP = "run the code that a pickle or a config brings; without it such files are refused"
_trusted: list[bool] = []


class DamagedError(ValueError):
    """A file that cannot be read to its end."""


class RefusedError(pickle.UnpicklingError):
    """A file, or a config, that would run code of its own."""


@contextlib.contextmanager
def reading(path: str | os.PathLike, advice: str = "") -> Iterator[None]:
    """Turns the many errors of a file that is cut short into one that names it.

    advice   what to do, in a sentence's second half
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, RefusedError, DamagedError,
            torch.OutOfMemoryError):  # fmt: skip
        raise
    except (EOFError, LookupError, OSError, RuntimeError, ValueError, pickle.UnpicklingError,
            zipfile.BadZipFile) as error:  # fmt: skip
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if why.startswith("UnpicklingError: Weights only"):  # goes on to say how to run its code
            why = "it holds more than tensors and plain values"
        raise DamagedError(
            f"{path} is damaged, or no checkpoint ({why}){'; ' if advice else ''}{advice}"
        ) from error


def is_whole(path: str | os.PathLike) -> bool:
    """Whether a file that torch.save (or pickle, .pkl) wrote is there to its end."""
    try:
        with open(path, "rb") as file:
            if os.fspath(path).endswith(".pkl"):
                file.seek(-1, os.SEEK_END)
                return file.read() == pickle.STOP
            return zipfile.is_zipfile(file)
    except OSError:
        return False


def newest_whole(paths: Iterable[str | os.PathLike]) -> str:
    """Advice that names the file written last among those that are whole."""
    whole = [os.fspath(path) for path in paths if is_whole(path)]
    if not whole:
        return "no whole one is beside it: start anew"
    return f"the newest whole one is {max(whole, key=os.path.getmtime)}"


def read_safetensors(
    path: str | os.PathLike, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and the texts beside them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "pt", device=str(device)) as file:
            return {n: file.get_tensor(n) for n in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedError(f"{path} is not a safetensors file ({error})") from error


def trust() -> None:
    """What --trust does: from now on files may bring code of their own."""
    _trusted.append(True)


def trusted() -> bool:
    """Whether --trust was given."""
    return bool(_trusted)


class TrustFlag(argparse.Action):
    """`--trust` of an argparse parser. It leaves no trace in the namespace."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any):
        hidden = argparse.SUPPRESS
        super().__init__(option_strings, hidden, nargs=0, default=hidden, help=TRUST_HELP)

    def __call__(self, *args: Any) -> None:
        trust()


def trust_option(command: Callable) -> Callable:
    """Adds `--trust` to a click command; its function does not see it."""
    import click

    def given(context: Any, parameter: Any, value: bool) -> None:
        if value:
            trust()

    flag: Any = {"is_flag": True, "expose_value": False, "callback": given, "help": TRUST_HELP}
    return click.option("--trust", **flag)(command)


def refusal(what: str) -> RefusedError:
    """The error for a file or config that asks for `what`."""
    return RefusedError(
        f"{what} is none of upstream's or torch's own classes, so it may run any code; if you "
        "trust where it comes from, repeat with --trust"
    )


PLAIN = {  # beside what torch's weights_only admits
    "builtins": ("dict", "float", "frozenset", "int", "list", "tuple"),
    "collections": ("defaultdict",),
    "numpy": ("scalar", "_reconstruct", "dtype", "ndarray"),
    "torch.nn.parameter": ("Buffer",),
}


class Unpickler(pickle.Unpickler):
    """Admits tensors, numpy's arrays and plain containers; a subclass may admit `other` names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage  # torch's own unpickles its bytes without any check
        home = "numpy" if module.startswith("numpy.") else module.replace("__builtin__", "builtins")
        known = f"{home}.{name}" in _get_allowed_globals() or name in PLAIN.get(home, ())
        return super().find_class(module, name) if known else self.other(module, name)

    def other(self, module: str, name: str) -> Any:
        """What stands for any other name; a class of torch's networks is that class."""
        if module.startswith("torch.nn.modules.") and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and issubclass(found, torch.nn.Module):
                return found
        raise refusal(f"{module}.{name}, which the file asks for,")


def _load_storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def pickle_module(unpickler: type[pickle.Unpickler]) -> Any:
    """What torch.load and upstream's code want of a pickle module."""

    def load(file: Any, **kwargs: Any) -> Any:
        return unpickler(file, **kwargs).load()

    return types.SimpleNamespace(
        __name__="pickle", Unpickler=unpickler, load=load, dump=pickle.dump
    )


def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, str]:
    """The values that both have and that differ, as in {"k": "0.1 there, 0.2 here"}.

    Numbers are compared to nine digits: the same schedule may come from another machine.
    """

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, float) and isinstance(b, float | int):
            return math.isclose(a, b, rel_tol=1e-9)
        return a == b

    return {
        name: f"{theirs[name]} there, {value} here"
        for name, value in ours.items()
        if name in theirs and not same(theirs[name], value)
    }


def listed(differences: Mapping[str, str], only: Collection[str] | None = None) -> str:
    """The differences in words, those among `only` where it is given; "" for none."""
    names = [name for name in differences if only is None or name in only]
    return "; ".join(f"{name}: {differences[name]}" for name in names)


def stop_if_not_finite(
    parameters: Iterable[Tensor], step: str, good: Callable[[], str], lost: bool = False
) -> None:
    """Ends the run, exit code 1, if a weight is not finite or the trainer says that it is lost.

    Call it before every save, and where the trainer reads its losses anyway. Weights are equal on
    all ranks, so that all ranks end at the same place.

    step   as in "step 12"
    good   returns the last good checkpoint, in words
    """
    weights = [p.detach() for p in parameters]
    largest = torch.stack([n.float() for n in torch._foreach_norm(weights, math.inf)])
    if bool(largest.isfinite().all()) and not lost:
        return
    what = "losses" if lost else "weights"
    message = (
        f"error: at {step} the denoiser's {what} are not finite: the training diverged. Nothing "
        f"was saved since; {good()}. Resume with a lower learning rate or a lower gamma, or in "
        "float32 instead of half precision"
    )
    raise SystemExit(message if rank() == 0 else 1)
