"""What is declared to be installed: exact, explained, and the same for pip and conda."""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from run.setup import env

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"([A-Za-z0-9_.-]+)==([0-9][^;\s]*)(?:;\s*python_version (<|>=) '3\.11')?")


@pytest.fixture(scope="module")
def project() -> dict:
    return env.read_project(ROOT, Path(sys.executable))


def requirements(project) -> list[str]:
    """Every declared requirement but the extras' references to each other."""
    listed = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        listed += extra
    for extra in project["tool"]["ogdm"]["no-deps"].values():
        listed += extra
    return [item for item in listed if not item.startswith("ogdm[")]


def pins(project, python: str = ">=") -> dict[str, set[str]]:
    """{package: versions} for Python 3.11 and later (">=") or for 3.10 ("<")."""
    found: dict[str, set[str]] = {}
    for item in requirements(project):
        name, version, marker = PIN.fullmatch(item).groups()
        if marker in (None, python):
            found.setdefault(name, set()).add(version)
    return found


def conda_pins() -> dict[str, str]:
    text = (ROOT / "environment.yml").read_text().split("- pip:")[1]
    listed = re.findall(r"^ +- (\S+)", text, flags=re.MULTILINE)
    assert all("==" in item for item in listed), listed
    return dict(item.split("==") for item in listed)


def test_every_pin_is_exact(project):
    loose = [item for item in requirements(project) if not PIN.fullmatch(item)]
    assert loose == []


def test_torch_is_the_one_that_was_tested(project):
    assert pins(project)["torch"] == {"2.13.0"}


@pytest.mark.parametrize("python", [">=", "<"], ids=["3.11", "3.10"])
def test_a_package_has_one_version(project, python):
    assert [name for name, versions in pins(project, python).items() if len(versions) > 1] == []


def test_both_pythons_get_the_same_packages(project):
    assert set(pins(project, "<")) == set(pins(project, ">="))


def test_conda_and_pip_agree(project):
    conda = conda_pins()
    torchvision = conda.pop("torchvision")
    assert conda == {name: versions.copy().pop() for name, versions in pins(project).items()}
    # torchvision 0.(n + 15) is built for torch 2.n; it would not import beside any other.
    minor = int(conda["torch"].split(".")[1])
    assert torchvision.split(".")[:2] == ["0", str(minor + 15)]


def test_nothing_declared_for_pip_brings_torchvision(project):
    assert "torchvision" not in pins(project)


def test_all_names_every_extra(project):
    extras = project["project"]["optional-dependencies"]
    assert set(env.expand(["all"], project)) == set(extras)


def test_no_deps_belong_to_an_extra(project):
    assert set(project["tool"]["ogdm"]["no-deps"]) <= set(
        project["project"]["optional-dependencies"]
    )


def test_the_core_stays_small(project):
    names = {PIN.fullmatch(item)[1] for item in project["project"]["dependencies"]}
    assert names == {"torch", "numpy"}


def test_every_dependency_has_its_reason():
    """A comment on the line, or on the first of the two lines that Python 3.10 and 3.11 need."""
    text = (ROOT / "pyproject.toml").read_text()
    unexplained, explained = [], set()
    for line in text.splitlines():
        item = re.match(r'\s*(?:\w+ = \[)?"([A-Za-z0-9_.-]+)==', line)
        if item and "#" in line:
            explained.add(item[1])
        elif item and item[1] not in explained:
            unexplained.append(item[1])
    assert unexplained == [], "say what it is for, on the same line"


def test_the_environment_in_use_has_the_pins(project):
    """Tests that pass with other versions prove little about these."""
    python = ">=" if sys.version_info >= (3, 11) else "<"
    wrong = {}
    for name, versions in pins(project, python).items():
        try:
            have = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        if have not in versions:
            wrong[name] = f"{have}, pinned {versions}"
    assert wrong == {}


def test_requires_python_is_kept_by_the_pins(project):
    """Each installed pin says which Pythons it takes; the declared markers must fit."""
    assert project["project"]["requires-python"] == ">=3.10"
    for item in requirements(project):
        name, version, marker = PIN.fullmatch(item).groups()
        try:
            package = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        if marker is None and package["Version"].split("+")[0] == version:
            wants = package["Requires-Python"] or ">=3"
            floor = re.search(r">=\s*3\.(\d+)", wants)
            assert not floor or int(floor[1]) <= 10, f"{name} {version} wants Python {wants}"
