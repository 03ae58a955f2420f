"""The house rules that a machine can check: scripts, arrows between modules, what a wheel holds."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from run.setup import env
from run.setup.patches import load
from run.setup.upstream import discover

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "run").glob("*.sh"))
RUNNABLE = [script for script in SCRIPTS if script.name != "lib.sh"]
CORE = ROOT / "ogdm_core"
BACKBONES = [file.parent.name for file in CORE.glob("*/__init__.py") if file.parent.name != "splice"]
POSITIONALS = {  # what a script wants before its flags
    "evaluate.sh": ["a.npz", "b.npz"],
    "export.sh": ["edm", "a.pkl", "b"],
    "figures.sh": ["grid", "--method", "A=b.npz"],
    "guidance.sh": ["train", "--data", "a", "--samples", "b.npz", "--output", "c"],
    "prepare_data.sh": ["cifar10", "a.tar.gz", "b"],
    "solvers.sh": ["a", "b.npz"],
    "train.sh": ["cifar10-edm-ogdm-ft"],
}


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    files = (ROOT / name for name in listed if name)
    return [file for file in files if file.is_file()]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def bare_clone(tmp_path_factory, bare_python):
    """run(script, *words) in a copy of this repository, with no packages; an install would be an error."""
    root = tmp_path_factory.mktemp("clone")
    for file in tracked():
        if file.relative_to(ROOT).parts[0] in ("run", "ogdm_core", "pyproject.toml", "constraints.txt"):
            (root / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, root / file.relative_to(ROOT), follow_symlinks=False)
    (root / ".setup").touch()  # a file where an install would make a folder: it would end at once
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OGDM_", "PYTHON"))}
    environment |= {"PATH": f"{bare_python.parent}:/usr/bin:/bin"}

    def run(script: Path, *words: str) -> subprocess.CompletedProcess:
        command = [root / script.relative_to(ROOT), *words]
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize("script", RUNNABLE, ids=name_of)
def test_scripts_explain_themselves_on_a_bare_clone(script, bare_clone):
    done = bare_clone(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert script.name in done.stdout


@pytest.mark.parametrize("script", [s for s in RUNNABLE if s.name != "test.sh"], ids=name_of)
def test_a_wrong_flag_is_refused_on_a_bare_clone(script, bare_clone):
    done = bare_clone(script, *POSITIONALS.get(script.name, []), "--no-such-flag")
    assert done.returncode == 2, done.stderr
    assert "--no-such-flag" in done.stderr


@pytest.mark.parametrize("script", [*RUNNABLE, ROOT / ".ci" / "run"], ids=name_of)
def test_scripts_are_bash_that_stops_at_errors(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_scripts_ask_for_extras_that_exist():
    extras = env.read_project(ROOT)["project"]["optional-dependencies"]
    asked = r"^.*?(?:ensure_env |launch \S+ |extras\+?=\(?)\"?([a-z ]+)"
    found = {(s.name, e) for s in RUNNABLE for w in re.findall(asked, s.read_text(), re.MULTILINE)
             for e in w.split()}  # fmt: skip
    assert len(found) > 20 and [pair for pair in found if pair[1] not in extras] == []


def imports(file: Path) -> set[str]:
    """Absolute names of what a module imports, inside functions too."""
    package = file.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def wrong_way(file: Path) -> list[str]:
    """The imports of a module of ogdm_core that point against the arrow."""
    room, *rest = file.relative_to(CORE).with_suffix("").parts
    others = [name for name in BACKBONES if not rest or name != room]
    forbidden = [r"run\b", r"tests\b"]
    if room != "splice":  # the old name of LDM's class
        forbidden.append(rf"ogdm_core\.({'|'.join(others)}|splice)\b")
    return [name for name in imports(file) if re.match("|".join(forbidden), name)]


@pytest.mark.parametrize("file", sorted(CORE.rglob("*.py")), ids=name_of)
def test_the_arrow_points_one_way(file):
    """run -> ogdm_core -> torch; the method knows no backbone, a backbone no other backbone."""
    assert wrong_way(file) == []


@pytest.mark.parametrize("name", sorted(folder.name for folder in (ROOT / "patches").iterdir()))
def test_patches_call_their_backbones_folder_only(name):
    backbone = discover(ROOT)[name].extra
    for patch in load(ROOT / "patches" / name):
        named = re.findall(r"(?:import|from) +(ogdm_core[\w.]*|run\b[\w.]*)", "\n".join(patch.added))
        allowed = re.compile(rf"ogdm_core\.{backbone}\b")
        assert [module for module in named if not allowed.match(module)] == [], patch.name


def test_the_core_imports_with_torch_and_numpy_alone():
    """Backbones' packages are extras, so `import ogdm_core` may not need them."""
    code = """
import importlib, pkgutil, sys
for name in ("click", "diffusers", "omegaconf", "pytorch_lightning", "mpi4py", "scipy",
             "matplotlib", "rich", "sklearn", "PIL", "tqdm", "accelerate"):
    sys.modules[name] = None
import ogdm_core
for module in pkgutil.iter_modules(ogdm_core.__path__):
    if not module.ispkg:
        importlib.import_module(f"ogdm_core.{module.name}")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what a wheel of this repository installs; the sources are copied first."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for file in tracked():
        if CORE in file.parents or file.name in ("pyproject.toml", "README.md", "LICENSE"):
            (sources / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, sources / file.relative_to(ROOT))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", folder / "site", sources], cwd=folder, capture_output=True, text=True)
    if "No module named" in done.stderr:
        pytest.skip("this environment has no pip or no setuptools to build a wheel with")
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_nothing_else(installed):
    held = {f.relative_to(installed) for f in installed.rglob("*") if "ogdm_core" in f.parts}
    held = {str(file) for file in held if file.suffix not in ("", ".pyc")}
    assert held == {name_of(file) for file in tracked() if CORE in file.parents}
    assert {f.name for f in installed.iterdir() if f.suffix != ".dist-info"} == {"ogdm_core"}


@pytest.mark.slow
def test_the_trainer_starts_from_an_installed_wheel(installed, tmp_path):
    """In an empty folder, in a Python that sees the wheel and the packages but not this clone."""
    packages = sysconfig.get_path("purelib")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [python, "-m", "ogdm_core.diffusers", "--help"],
        cwd=tmp_path / "empty", capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{installed}{os.pathsep}{packages}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--ogdm" in done.stdout


def test_no_file_names_somebodys_machine():
    unwanted = re.compile(r"(?<![\w.])/(work|tmp|root|home)/\w|\bpypi\.org|files\.pythonhosted")
    told = []
    for file in tracked():
        if file.suffix in (".png", ".npz", ".gif", ".svg") or file == Path(__file__).resolve():
            continue
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
            if unwanted.search(line):
                told.append(f"{name_of(file)}:{number}: {line.strip()[:80]}")
    assert told == []


def test_the_citation_is_the_papers():
    text = (ROOT / "CITATION.cff").read_text()
    assert "Observation-Guided Diffusion Probabilistic Models" in text
    for name in ("Kang", "Choi", "Han"):
        assert f"family-names: {name}" in text
