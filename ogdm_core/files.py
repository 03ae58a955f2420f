"""Files that are written whole or not at all, and their hashes."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "wb", sync: bool = True) -> Iterator[IO[Any]]:
    """Opens a file to write; it replaces `path` when the block ends well, and not otherwise.

    The folder is made if need be. Two processes that write the same path do not disturb each other.
    `sync` waits until the content is on the disk; leave it out for many small files.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, mode) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        why = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(why, OSError):
            raise
        # "No space left on device" names no file, and torch.save raises "unexpected pos" after it.
        why.filename = why.filename or str(path)
        raise why from None
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike) -> None:
    """Raises OSError now if a file could not be written at `path` later; makes its folder."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with atomic_write(path, "w") as file:
        file.write(text)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The object in a JSON file; ValueError with the file's name for any other content."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); get it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} in place of names and values; get it again")
    return found


def sha256(path: str | os.PathLike) -> str:
    """The SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
