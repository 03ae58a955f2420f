"""What run/setup.sh does: the environment, the submodules, the patches. Standard library only."""

import json
import sys
from pathlib import Path


class Refusal(Exception):
    """Setup does not go on, and touched nothing. The message says what to do."""


def say(*words: object, sep: str = " ") -> None:
    """Prints to stderr: stdout belongs to the path that --print-python prints."""
    print(*words, file=sys.stderr, flush=True, sep=sep)


def read_json_or_empty(file: Path) -> dict:
    """The dict in a JSON file; {} where the file is absent or damaged."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
