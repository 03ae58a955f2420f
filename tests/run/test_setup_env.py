"""The environment that run/*.sh make for themselves, without installing anything here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from run.setup import Refusal, env

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """
[build-system]
requires = ["setuptools"]
[project]
name = "ogdm"
dependencies = ["torch>=1"]
[project.optional-dependencies]
edm = ["click==8"]
ldm = ["ogdm[edm]", "omegaconf==2"]
all = ["ogdm[edm,ldm]"]
[tool.ogdm.no-deps]
ldm = ["loner==3"]
[tool.ruff]
line-length = 100
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with declarations; commands are recorded and not run, except for making the venv."""
    monkeypatch.delenv("OGDM_PYTHON", raising=False)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "constraints.txt").write_text("torch==1.2\n")
    return tmp_path


@pytest.fixture
def commands(root, monkeypatch):
    """The commands that would have been run."""
    seen = []

    def run(command, where, failed, advice):
        words = [str(word) for word in command]
        seen.append(words)
        if str(root / ".venv") in words:
            make_python(root / ".venv")

    monkeypatch.setattr(env, "_run", run)
    monkeypatch.setattr(env, "_works", lambda *c: Path(c[0]).exists())
    return seen


def make_python(folder: Path) -> None:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").unlink(missing_ok=True)
    (folder / "bin" / "python").symlink_to(sys.executable)


def test_the_first_run_installs_and_the_second_does_nothing(root, commands):
    assert not env.complete(["ldm"], root)
    assert env.ensure(["ldm"], root) == root / ".venv" / "bin" / "python"
    make, with_deps, without, _ = commands
    assert make[1:3] == ["-m", "venv"]
    assert with_deps[-2:] == ["--editable", f"{root}[ldm]"]
    assert without[-2:] == ["--no-deps", "loner==3"]
    for command in (with_deps, without):
        assert command[command.index("--constraint") + 1] == str(root / "constraints.txt")
    commands.clear()
    for extras in (["ldm"], ["edm"], []):  # ldm names edm, so it is in
        assert env.complete(extras, root) and env.ensure(extras, root)
    assert commands == []


def test_extras_add_up(root, commands):
    env.ensure(["edm"], root)
    assert not any("loner==3" in command for command in commands), "it belongs to ldm"
    commands.clear()
    env.ensure(["ldm"], root)
    assert commands[0][-1] == f"{root}[edm,ldm]"
    assert env.installed_extras(root) == ["edm", "ldm"]


def replace(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def test_other_declarations_install_again_but_other_lint_rules_do_not(root, commands):
    env.ensure(["edm"], root)
    commands.clear()
    replace(root / "pyproject.toml", "line-length = 100", "line-length = 80")
    env.ensure(["edm"], root)
    assert commands == []
    for file, old, new in (("pyproject.toml", "click==8", "click==9"), ("constraints.txt", "1.2", "1.3")):
        replace(root / file, old, new)
        env.ensure([], root)
        assert commands[0][-1] == f"{root}[edm]", "what was in stays in"
        commands.clear()


def test_an_interrupted_install_is_taken_up_again(root, commands, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    env.ensure(["edm"], root)
    replace(root / "constraints.txt", "1.2", "1.3")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(env, "_run", interrupted)
        env.ensure(["edm"], root)
    replace(root / "constraints.txt", "1.3", "1.2")
    commands.clear()
    env.ensure(["edm"], root)
    assert commands


def test_a_venv_whose_python_is_gone_is_made_anew(root, commands):
    env.ensure(["edm"], root)
    python = root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/does/not/exist/python")
    commands.clear()
    env.ensure(["edm"], root)
    assert commands[0][1:4] == ["-m", "venv", "--clear"]


def test_an_unknown_extra_is_named(root, commands):
    with pytest.raises(Refusal, match="no extra 'adn'; known: edm, ldm, all"):
        env.ensure(["adn"], root)


def test_ogdm_python_is_used_as_it_is(root, commands, monkeypatch):
    monkeypatch.setenv("OGDM_PYTHON", sys.executable)
    assert env.ensure(["edm"], root) == Path(sys.executable)
    assert commands == []
    monkeypatch.setenv("OGDM_PYTHON", "no-such-python")
    with pytest.raises(Refusal, match="OGDM_PYTHON=no-such-python"):
        env.ensure(["edm"], root)
    done = bash("source run/lib.sh; ensure_env; echo went on", OGDM_PYTHON="no-such-python")
    assert done.returncode == 1 and "went on" not in done.stdout


def test_a_failed_command_shows_its_end_and_the_advice(root):
    (root / ".setup").mkdir()
    code = "print('many words'); print('the cause'); raise SystemExit(2)"
    with pytest.raises(Refusal) as caught:
        env._run([sys.executable, "-c", code], root, "it failed", "Try this.")
    assert "the cause" in str(caught.value) and "Try this." in str(caught.value)
    assert "many words" in (root / ".setup" / "install.log").read_text()


def bash(script: str, **extra) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT, env=os.environ | extra, capture_output=True, text=True,
    )  # fmt: skip


def test_scripts_get_the_python_and_the_package():
    script = """
        source run/lib.sh
        ensure_env diffusers
        "$PYTHON" -c 'import importlib.util; print(importlib.util.find_spec("ogdm_core").origin)'
        command -v "$(basename "$PYTHON")"
    """
    done = bash(script, OGDM_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    package, python = done.stdout.splitlines()
    assert Path(package) == ROOT / "ogdm_core" / "__init__.py"
    assert python == sys.executable


def test_no_python_is_explained(tmp_path):
    """With an old Python only, as on a cluster's login node."""
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    script = "source run/lib.sh; ROOT=/nowhere; PATH=$ONLY; base_python"
    done = bash(script, ONLY=str(tmp_path), OGDM_PYTHON="")
    assert done.returncode == 1
    assert "no Python 3.11 or later found" in done.stderr


FLAGS = "import argparse; parse = argparse.ArgumentParser().parse_args"


@pytest.fixture
def modules(tmp_path):
    """A folder with modules to launch; `heavy` needs a package for its flags, too."""
    for file, text in {
        "light/flags.py": FLAGS,
        "heavy/flags.py": "import a_package_that_setup_would_install",
        "late/flags.py": "def parse(argv): import a_package_that_setup_would_install",
    }.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
        (tmp_path / file).with_name("__main__.py").write_text("import sys; print('ran with', *sys.argv[1:])")
    return tmp_path


@pytest.mark.parametrize("words", ["light", "heavy --wrong", "late --wrong", "none --wrong"])
def test_flags_that_cannot_be_checked_yet_are_left_to_the_command(modules, words):
    """What can be refused before an install is: tests/run/test_packaging_house.py."""
    done = bash(f"source run/lib.sh; ROOT={modules}; check_arguments {words}; echo went on", OGDM_PYTHON=sys.executable)
    assert done.returncode == 0 and "went on" in done.stdout


def launch(modules, arguments: str, python) -> subprocess.CompletedProcess:
    """launch `light` with run/setup of this repository and the modules of the folder."""
    (modules / "run").symlink_to(ROOT / "run")
    script = f"source run/lib.sh; ROOT={modules}; launch light 'diffusers mnist' {arguments}"
    return bash(script, OGDM_PYTHON=str(python))


def test_the_flags_module_answers_help_and_lets_the_rest_run(modules):
    done = launch(modules, "--help", sys.executable)
    assert done.returncode == 0 and "usage" in done.stdout and "ran with" not in done.stdout
    (modules / "run").unlink()
    done = launch(modules, "", sys.executable)
    assert (done.returncode, done.stdout) == (0, "ran with\n"), done.stderr


def test_a_python_without_torch_is_told_what_to_install(modules, bare_python):
    done = launch(modules, "--wrong", bare_python)
    assert done.returncode == 2 and "--wrong" in done.stderr
    (modules / "run").unlink()
    done = launch(modules, "", bare_python)
    assert done.returncode == 1 and "has no torch" in done.stderr and "-e '.[diffusers,mnist]'" in done.stderr
