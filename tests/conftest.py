"""Shared fixtures: pristine and patched copies of the upstream codebases."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _copy(name: str, destination: Path) -> Path:
    """Writes the submodule's files, exactly as upstream has them, to `destination`."""
    source = ROOT / "third_party" / name
    if not (source / ".git").exists():
        pytest.skip(f"third_party/{name} is not here; run/setup.sh {name} fetches it")
    subprocess.run(
        ["git", "-C", source, "checkout-index", "--all", f"--prefix={destination}/"], check=True
    )
    return destination


def _patch(name: str, destination: Path) -> Path:
    folder = ROOT / "patches" / name
    for patch in (folder / "series").read_text().split():
        subprocess.run(
            ["git", "apply", "--unidiff-zero", folder / patch], cwd=destination, check=True
        )
    return destination


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """pristine(name) -> folder with the untouched upstream codebase `name`."""
    made = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = _copy(name, tmp_path_factory.mktemp("pristine") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """patched(name) -> folder with the upstream codebase `name`, our series applied."""
    made = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = _patch(name, _copy(name, tmp_path_factory.mktemp("patched") / name))
        return made[name]

    return get
