"""What is declared to be installed: ranges for everybody, exact versions for setup and CI."""

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from run.setup import env

ROOT = Path(__file__).resolve().parents[2]
PROJECT = env.read_project(ROOT)
EXTRAS = PROJECT["project"]["optional-dependencies"]


def constraints() -> dict[str, str]:
    """{package: exact version}."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "one NAME==VERSION per line"
    return {canonicalize_name(name): version for name, version in pairs}


def declared() -> list[Requirement]:
    """Every declared requirement but the extras' references to each other."""
    listed = list(PROJECT["project"]["dependencies"])
    for group in (*EXTRAS.values(), *PROJECT["tool"]["ogdm"]["no-deps"].values()):
        listed += group
    return [Requirement(item) for item in listed if not item.startswith("ogdm[")]


def test_constraints_hold_versions_and_nothing_else():
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"^[^#].*(://|@|/|;|\+)", text, re.MULTILINE), "no hosts, paths or builds"
    names = [canonicalize_name(n) for n in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)]
    assert len(names) == len(set(names))


def test_every_requirement_allows_its_exact_version():
    exact = constraints()
    for requirement in declared():
        version = exact[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}, constrained to {version}"


def test_torchvision_is_the_one_built_for_torch():
    """torchvision 0.(n + 15) is built for torch 2.n; it would not import beside any other."""
    torch, torchvision = (constraints()[name].split(".") for name in ("torch", "torchvision"))
    assert (torch[0], torchvision[0]) == ("2", "0") and int(torchvision[1]) == int(torch[1]) + 15


def test_nothing_declared_for_pip_brings_torchvision():
    assert "torchvision" not in {requirement.name for requirement in declared()}


def test_all_names_every_extra_and_the_quickstarts_stays_small():
    assert set(env.expand(["all"], PROJECT)) == set(EXTRAS)
    assert env.expand(["diffusers"], PROJECT) == ["common", "diffusers"]


def test_no_deps_belong_to_an_extra_and_are_in_condas_list():
    alone = PROJECT["tool"]["ogdm"]["no-deps"]
    assert set(alone) <= set(EXTRAS)
    listed = (ROOT / "environment.yml").read_text().split("- pip:")[1]
    lines = re.findall(r"^ +- (.+)$", listed, flags=re.MULTILINE)
    packages = [item for group in alone.values() for item in group]
    assert lines == ["-c constraints.txt", "-e .[all]", "torchvision", *packages]


def test_the_environment_in_use_has_the_exact_versions():
    """Tests that pass with other versions prove little about these."""
    wrong = {}
    for name, version in constraints().items():
        try:
            have = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        if have != version:
            wrong[name] = f"{have}, constrained to {version}"
    assert wrong == {}


def test_every_installed_requirement_is_constrained():
    """Transitive packages too: otherwise tomorrow's install is not today's."""
    exact, loose = constraints(), set()
    todo, done = [r for r in declared() if r.name != "torchvision"], set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in exact:
            loose.add(name)
        for extra in ["", *requirement.extras]:
            if (name, extra) in done:
                continue
            done.add((name, extra))
            try:
                wants = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            for item in map(Requirement, wants):
                if item.marker is None or item.marker.evaluate({"extra": extra}):
                    todo.append(item)
    # A GPU build of torch requires exact versions of its CUDA packages by itself.
    assert {name for name in loose if not re.match(r"nvidia-|cuda-|triton", name)} == set()


def test_the_oldest_python_is_the_same_everywhere():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    for file in ("run/lib.sh", "run/setup/env.py"):
        assert f"({oldest.replace('.', ', ')})" in (ROOT / file).read_text()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow)[0] == oldest


def test_every_dependency_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text()
    lines = re.findall(r'^ +"([\w.-]+)[><=]=.*$', text, re.MULTILINE)
    explained = re.findall(r'^ +"([\w.-]+)[><=]=[^"]*",? +# \w.*$', text, re.MULTILINE)
    assert [name for name in lines if name not in explained and name != "torch"] == []
