"""Shared fixtures: pristine and patched copies of the upstream codebases. And a plain summary."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import venv
from collections import Counter
from pathlib import Path

import pytest

from run.setup.upstream import State, Submodule, discover, inspect

pytest_plugins = ["tests.run.setup_house"]  # fixtures for the tests of run/setup.sh

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    parser.addoption("--faults", action="store_true", help="run the slow tests of faults, too")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if {"patched", "pristine", "submodule"} & set(item.fixturenames) or item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.upstream)
    if not config.getoption("--faults"):
        slow = pytest.mark.skip(reason="a slow test of faults; run/test.sh --faults runs them")
        for item in items:
            if item.get_closest_marker("faults"):
                item.add_marker(slow)


os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored, as behind a shell's `&`
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup; processes that tests start hear it
    signal.signal(signal.SIGHUP, lambda *args: None)


@pytest.fixture
def refused(capsys):
    """`with refused(TEXT):` a command ends with status 2 and an error that matches."""

    @contextlib.contextmanager
    def check(text: str):
        with pytest.raises(SystemExit) as end:
            yield
        said = capsys.readouterr().err
        assert end.value.code == 2 and "error: " in said and re.search(text, said), said

    return check


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory) -> Path:
    """A Python with the standard library alone, as on a fresh machine: no torch, no pip."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python3"


@pytest.fixture(scope="session")
def submodule():
    """submodule(name) -> the Submodule at its pinned commit; skips the test if it is not here."""

    def get(name: str) -> Submodule:
        if not (ROOT / ".git").exists():
            pytest.skip("this is not a git clone, so there are no submodules")
        sub = discover(ROOT)[name]
        report = inspect(sub)
        if report.state is State.MISSING:
            pytest.skip(f"third_party/{name} is not here; run/setup.sh {name} fetches it")
        if report.head != sub.pin:
            pytest.fail(report.problem)
        return sub

    return get


def _copies(submodule, folder: Path, patch: bool):
    """get(name) -> folder with the upstream's files as they are, or with our patches applied."""

    @functools.cache
    def get(name: str) -> Path:
        sub = submodule(name)
        git = ["git", "-C", sub.path]
        if subprocess.run([*git, "diff", "--cached", "--quiet", "HEAD"]).returncode:
            pytest.fail(f"{sub.label} has staged changes; `git -C {sub.label} reset` unstages them")
        subprocess.run([*git, "checkout-index", "--all", f"--prefix={folder / name}/"], check=True)
        for path, content in sub.results().items() if patch else ():
            (folder / name / path).write_bytes(content)
        return folder / name

    return get


@pytest.fixture(scope="session")
def pristine(submodule, tmp_path_factory):
    """pristine(name) -> folder with the untouched upstream codebase `name`."""
    return _copies(submodule, tmp_path_factory.mktemp("pristine"), patch=False)


@pytest.fixture(scope="session")
def patched(submodule, tmp_path_factory):
    """patched(name) -> folder with the upstream codebase `name`, our patches applied."""
    return _copies(submodule, tmp_path_factory.mktemp("patched"), patch=True)


def pytest_terminal_summary(terminalreporter):
    """Says what was left out and why, one line per reason; `-rs` would list every place."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in skipped
    )
    if not reasons:
        return
    terminalreporter.section("left out")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} {'test' if count == 1 else 'tests'}: {reason}")
