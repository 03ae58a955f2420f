"""The house rules that a machine can check: scripts, arrows between modules, what a wheel holds."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from run.setup import env

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "run").glob("*.sh"))
RUNNABLE = [script for script in SCRIPTS if script.name != "lib.sh"]
CORE = ROOT / "ogdm_core"


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


@pytest.mark.parametrize("script", RUNNABLE, ids=name_of)
def test_scripts_explain_themselves_before_they_install_anything(script):
    done = subprocess.run(
        [script, "--help"], cwd="/", capture_output=True, text=True, timeout=60,
        env=os.environ | {"OGDM_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert script.name in done.stdout


@pytest.mark.parametrize("script", [*RUNNABLE, ROOT / ".ci" / "run"], ids=name_of)
def test_scripts_are_bash_that_stops_at_errors(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_scripts_ask_for_extras_that_exist():
    extras = env.read_project(ROOT, Path(sys.executable))["project"]["optional-dependencies"]
    for script in RUNNABLE:
        for line in re.findall(r"^\s*ensure_env ([a-z ]+)$", script.read_text(), re.MULTILINE):
            assert set(line.split()) <= set(extras), f"{script.name}: ensure_env {line}"


def imports(file: Path) -> set[str]:
    """Absolute names of what a module of ogdm_core imports, inside functions too."""
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


def backbone(name: str) -> str:
    """adm of `adm`, `sample_adm` and `resume_adm`; nothing of what the splices share."""
    last = name.split("_")[-1]
    return last if last in ("adm", "edm", "ldm", "diffusers") else ""


@pytest.mark.parametrize("file", sorted(CORE.glob("*.py")), ids=name_of)
def test_the_core_knows_no_backbone(file):
    wrong = [
        name for name in imports(file) if name.startswith(("ogdm_core.splice", "ogdm_core.compat"))
    ]
    assert wrong == []


@pytest.mark.parametrize("file", sorted((CORE / "splice").glob("[!_]*.py")), ids=name_of)
def test_a_splice_knows_no_other_splice(file):
    others = [
        name for name in imports(file)
        if (match := re.match(r"ogdm_core\.splice\.(\w+)", name))
        and backbone(match[1]) not in ("", backbone(file.stem))
    ]  # fmt: skip
    assert others == []


def test_every_package_has_an_init():
    folders = {file.parent for file in CORE.rglob("*.py")}
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


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


def test_an_installed_copy_holds_every_module():
    """What setuptools would put in a wheel, without building one."""
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not in this environment")
    found = set(setuptools.find_packages(str(ROOT), include=["ogdm_core*"]))
    packages = {".".join(file.parent.relative_to(ROOT).parts) for file in CORE.rglob("*.py")}
    assert found == packages
    data = [file for file in tracked() if CORE in file.parents and file.suffix != ".py"]
    declared = env.read_project(ROOT, Path(sys.executable))["tool"]["setuptools"]["package-data"]
    held = {file for pattern in declared["ogdm_core"] for file in CORE.glob(pattern)}
    assert [name_of(file) for file in data if file not in held] == []


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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_files_that_exist(page):
    text = (ROOT / page).read_text()
    scripts = set(re.findall(r"\brun/\w+\.sh\b", text))
    links = {link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in link}
    missing = [name for name in sorted(scripts | links) if not (ROOT / name).exists()]
    assert missing == []


def test_the_citation_is_the_papers():
    text = (ROOT / "CITATION.cff").read_text()
    assert "Observation-Guided Diffusion Probabilistic Models" in text
    for name in ("Kang", "Choi", "Han"):
        assert f"family-names: {name}" in text
