"""What may be unpickled: tensors, arrays and plain containers; anything else needs `--trust`."""

import argparse
import importlib
import io
import pickle
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals

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

    return types.SimpleNamespace(__name__="pickle", Unpickler=unpickler, load=load, dump=pickle.dump)
