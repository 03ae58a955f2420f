"""A run's folder, and how a run ends: the same for every trainer.

claim           one trainer per folder; partial files of processes that died are removed
agree           the ranks compare their settings
fingerprint     which images a run trains on
keep_previous   the checkpoint that is about to be replaced
Stop            signals end a run after its step, on all ranks at the same one
Ahead           and so does a batch that cannot be read
Named           a data set that names the file of such a batch
outlive_output  a lost or full stdout does not end a run
"""

import atexit
import contextlib
import hashlib
import os
import re
import signal
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch.utils.data import Dataset

from .checkpoints import DamagedError, differences, format_differences
from .distributed import average, gather, print_once, rank, world
from .lock import TakenError, take
from .sealed import size

LOCK = ".training.lock"
STOPPED = 130  # exit status of a run that a signal ended after its step
_held: dict[Path, IO[str]] = {}


def claim(folder: str | os.PathLike) -> None:
    """Keeps every other trainer out of a run's folder until this process ends; all ranks call it.

    Ends the command, exit code 1, where another one trains there. A folder in a bucket has no lock.
    """
    refusal = _claim(Path(folder).resolve()) if rank() == 0 and "://" not in str(folder) else ""
    if refusal := gather(refusal)[0]:
        raise SystemExit(f"error: {refusal}" if rank() == 0 else 1)


def _claim(folder: Path) -> str:
    """Why the folder cannot be had; empty if it is ours now."""
    if folder in _held:
        return ""
    try:
        _held[folder] = take(folder / LOCK)
    except TakenError as holder:
        return f"{holder} is training in {folder}; wait for its end, or give another folder"
    except OSError as error:
        print_once(f"{folder} has no lock ({error}): nothing keeps a second trainer out of it")
        return ""
    for part in folder.rglob(".*.part"):  # as `files.atomic_write` names them
        match = re.fullmatch(r"\..+\.(\d+)\.part", part.name)
        if match and not _alive(int(match[1])):
            part.unlink(missing_ok=True)
    return ""


@atexit.register
def release() -> None:
    """Gives every folder back."""
    while _held:
        _held.popitem()[1].close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def agree(settings: Mapping[str, Any]) -> None:
    """Ends the command, exit code 1, where a rank has other settings than rank 0; all ranks call it."""
    ranks = gather(dict(settings))
    differ = {r: format_differences(differences(ranks[0], theirs)) for r, theirs in enumerate(ranks)}
    if words := "; ".join(f"rank {r} has other settings than rank 0: {words}" for r, words in differ.items() if words):
        raise SystemExit(f"error: {words}; give all ranks the same command" if rank() == 0 else 1)


def fingerprint(path: str | os.PathLike) -> str:
    """The number of files in a folder or an archive, and a hash of their names and sizes.

    Of an archive (zip, npz) the hash is of its members' contents, too. Empty where there is no such path.
    """
    path = Path(path)
    if zipfile.is_zipfile(path) if path.is_file() else False:
        with zipfile.ZipFile(path) as archive:
            return _known_by([f"{m.filename} {m.file_size} {m.CRC}" for m in archive.infolist()])
    if not path.exists():
        return ""
    return listed([path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.name[0] != "."], path)


def listed(files: Iterable[str | os.PathLike], root: str | os.PathLike) -> str:
    """The number of files, and a hash of their names below `root` and their sizes."""
    return _known_by([f"{os.path.relpath(file, root)} {size(os.fspath(file))}" for file in files])


def _known_by(lines: list[str]) -> str:
    digest = hashlib.blake2b("\n".join(sorted(lines)).encode(errors="surrogateescape"), digest_size=8)
    return f"{len(lines)} files, {digest.hexdigest()}"


def named(saved: str | None, now: str) -> None:
    """Says where a run is continued on other data than it was saved with."""
    if saved and now and saved != now:
        print_once(f"the data has changed since the checkpoint: {saved} there, {now} here")


def previous(path: Path) -> Path:
    """Where the checkpoint before `path` is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Keeps the file at `path`, which is about to be replaced, until the next call.

    It is a link: at every moment `path` is there. On a file system without links none is kept.
    """
    kept = previous(path)
    part = kept.with_name(f".{kept.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        os.link(path, part)
        os.replace(part, kept)


class Stop:
    """From `listen` on SIGINT, SIGTERM and a lost terminal (SIGHUP) are noted; a second one ends the process at once.

    A trainer asks after every step, and saves and ends where it is to. So it does after `failure`, a text that says
    why this rank has no batch for the next step.
    """

    def __init__(self) -> None:
        self.asked, self.failure, self._pid = False, "", os.getpid()
        self._before: dict[int, Any] = {}

    def listen(self) -> "Stop":
        """Takes the place of the handlers there are."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]  # ignored as under nohup, or after `&`
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def forget(self) -> None:
        """Puts them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a data worker, which ends with its trainer
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def together(self, device: torch.device | str = "cpu") -> bool:
        """Whether a rank is to stop: the same answer on all of them."""
        mine = self.asked or bool(self.failure)
        if world() == 1:
            return mine
        flag = torch.tensor(float(mine), device=device)
        average([flag])
        return bool(flag > 0)

    def leave(self, where: str, log: Callable[[str], object] | None = None) -> NoReturn:
        """Ends the command on all ranks, which call it when they have saved: exit code 1 with a failure, else 130.

        where   the run stopped, and how it is continued
        log     a trainer's own, which prints on stdout, too
        """
        failures = [failure for failure in gather(self.failure) if failure]
        if rank() == 0:
            why = f"error: {failures[0]}; stopped" if failures else "stopped by a signal"
            if log:
                log(f"{why} {where}")
            if failures or not log:
                print(f"{why} {where}", file=sys.stderr if failures else sys.stdout, flush=True)
        gather(None)  # a launcher ends the others when the first one ends
        raise SystemExit(1 if failures else STOPPED)


class UnreadableError(DamagedError):
    """A batch cannot be read; one line says why. torch puts a data worker's traceback in front of it."""

    def __init__(self, text: str):
        super().__init__(text.strip().rpartition("UnreadableError: ")[2])


class Named(Dataset):
    """A data set that names the file of an item that cannot be read.

    path   returns the file of item i, and can be pickled
    """

    def __init__(self, images: Any, path: Callable[[Any, int], str]):
        self.images, self.path = images, path

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        try:
            return self.images[i]
        except Exception as error:
            raise UnreadableError(f"{self.path(self.images, i)} cannot be read ({_last_line(error)})") from error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle asks before there is anything
            raise AttributeError(name)
        return getattr(self.images, name)


class Ahead:
    """A trainer's batches, those of the next step fetched before the end of a step decides about stopping.

    One that cannot be read ends the run as a signal does: all ranks save the step that is done.

    count   batches per step
    """

    def __init__(self, batches: Iterator, stop: Stop, count: int = 1, device: torch.device | str = "cpu"):
        self.batches, self.stop, self.count, self.device = batches, stop, count, device
        self._next: deque[Any] = deque()

    def __iter__(self) -> "Ahead":
        return self

    def __next__(self) -> Any:
        if not self._next:
            self.look()
            if self.stop.together(self.device):
                self.stop.leave("before the first step of this start; nothing was saved")
        return self._next.popleft()

    def look(self) -> None:
        """Fetches the batches of the next step; not for the step after the last, which may have none.

        Ctrl-C reaches data workers, too, and they end at once: their failure is none of the data's.
        """
        if self.stop.asked:
            return
        try:
            while len(self._next) < self.count:
                self._next.append(next(self.batches))
        except Exception as error:  # noqa: BLE001  whatever a data set raises
            self.stop.failure = "" if self.stop.asked else _last_line(error)


def _last_line(error: Exception) -> str:
    """Of what it says, or its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def outlive_output() -> None:
    """From here on a stdout or stderr that is lost, or whose disk is full, is dropped; the run goes on."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not hasattr(stream, "outlives"):
            stream.outlives = True  # type: ignore[union-attr]
            for name in ("write", "flush"):
                setattr(stream, name, _dropping(stream, getattr(stream, name)))


def _dropping(stream: IO[str], call: Callable) -> Callable:
    def act(*args: Any) -> Any:
        try:
            return call(*args)
        except OSError:
            with contextlib.suppress(OSError, AttributeError):  # what is left in its buffer goes there as well
                lost, null = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, lost)
                os.close(null)
            return len(args[0]) if args else None

    return act
