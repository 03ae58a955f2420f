"""Reading checkpoints safely: damaged files, settings that differ, runs that diverged.

reading              names a file that cannot be read, and says what to do
all_finite           whether tensors hold numbers only
differences          which settings of a saved run differ from this run's
Guard                ends a run that diverged before it replaces a good checkpoint

`trust` refuses pickles that would run code; `sealed` checks that a checkpoint is complete.
"""

import contextlib
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .distributed import average, rank
from .trust import RefusedError

GROWTH = 1e3  # weights, their averages or a loss beyond so many times the first ones have diverged
FIRST = 10  # reports of the loss that are taken as the first ones


class DamagedError(ValueError):
    """A file that cannot be read to its end."""


@contextlib.contextmanager
def reading(path: str | os.PathLike, advice: str = "") -> Iterator[None]:
    """Turns the many errors of a file that is cut short into one that names it.

    advice   what to do, in a sentence's second half
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, RefusedError, DamagedError, torch.OutOfMemoryError):
        raise
    except (AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
            pickle.UnpicklingError, zipfile.BadZipFile) as error:  # fmt: skip
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if why.startswith("UnpicklingError: Weights only"):  # goes on to say how to run its code
            why = "it holds more than tensors and plain values"
        raise DamagedError(f"{path} is damaged, or no checkpoint ({why}){'; ' if advice else ''}{advice}") from error


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


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, str]:
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


def format_differences(differences: Mapping[str, str], only: Collection[str] | None = None) -> str:
    """The differences in words, those among `only` where it is given; "" for none."""
    names = [name for name in differences if only is None or name in only]
    return "; ".join(f"{name}: {differences[name]}" for name in names)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value of the tensors is NaN or infinite."""
    return math.isfinite(largest(tensors))


def largest(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value; NaN or infinite where one of the values is."""
    norms = torch._foreach_norm([t.detach() for t in tensors], math.inf)
    return float(torch.stack([n.float() for n in norms]).max())


class Guard:
    """Ends a run that diverged, exit code 1, before it replaces a good checkpoint.

    The largest weight, and the largest of their averages, is compared with its own when the first loss is counted;
    the mean of the trainer's loss with the largest of its first ten. All of them are equal on all ranks, so that all
    ranks end at the same place.

    weights   returns the denoiser's
    averages  returns those of the weights (EMA)
    good      returns the last good checkpoint, in words
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[Tensor]],
        averages: Callable[[], Iterable[Tensor]],
        good: Callable[[], str],
    ):
        self._parts, self._good = {"weights": weights, "averages": averages}, good
        self._start: dict[str, float] = {}
        self._count = 0  # of microbatches since the last look
        self._sums: Tensor | float = 0.0  # of their mean losses that are finite, how many are, how many are not
        self._means: list[float] = []

    def count(self, losses: Tensor) -> None:
        """The trainer's losses of a microbatch, on this rank; only the first call waits for the device."""
        if not self._start:
            self._start = {name: self._largest(name) for name in self._parts}
        mean = losses.detach().float().mean()
        good = mean.isfinite()
        self._count += 1
        self._sums = self._sums + torch.stack([mean.where(good, 0), good, ~good])

    def check(self, step: str) -> None:
        """Looks at the weights. Call it before every save, and where the trainer reads its losses anyway.

        step   as in "step 12"
        """
        for name in self._parts:
            now, start = self._largest(name), self._start.get(name, 0.0)
            if not math.isfinite(now):
                self._stop(step, f"{name} are not finite")
            if now > GROWTH * start > 0:
                self._stop(step, f"{name} reach {now:.3g}, and {start:.3g} when the run was started")

    def look(self, step: str) -> None:
        """Looks at the losses since the last time, once they are of ten microbatches. All ranks call it.

        A few that are not finite end no run: trainers drop such a step, or its gradient.
        """
        if self._count < FIRST:
            return
        sums, self._count, self._sums = torch.as_tensor(self._sums), 0, 0.0
        average([sums])
        total, good, bad = sums.tolist()
        if bad >= good:
            self._stop(step, "losses are not finite")
        if len(self._means) < FIRST:
            self._means.append(total / good)
        elif total / good > GROWTH * max(self._means):
            self._stop(step, f"loss is {total / good:.3g}, and at most {max(self._means):.3g} at first")

    def _stop(self, step: str, what: str) -> NoReturn:
        message = (
            f"error: at {step} the denoiser's {what}: the training diverged. Nothing "
            f"was saved since; {self._good()}. Resume with a lower learning rate or a lower rho or gamma, or in "
            "float32 instead of half precision"
        )
        raise SystemExit(message if rank() == 0 else 1)

    def _largest(self, name: str) -> float:
        tensors = list(self._parts[name]())
        return largest(tensors) if tensors else 0.0
