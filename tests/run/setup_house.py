"""A small house for the tests of run/setup.sh: our scripts, one pinned upstream, two patches."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from run.setup.patches import file_name

ROOT = Path(__file__).resolve().parents[2]
URL = "https://upstream.invalid/acme/widget.git"
REASON = (
    "Make the widget talk, because a silent widget cannot be tested at all by anybody.\n\n"
    "Nothing gentler would do: it has no hook that our own code could be called from."
)
TRAIN = "".join(f"line {n} of train\n" for n in range(1, 21))
MODEL = "".join(f"line {n} of model\n" for n in range(1, 11))


def shell(*command, cwd, env=None):
    """Runs a command that must succeed; returns its stdout."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class House:
    """A clone of a repository like ours, whose only upstream is acme/widget."""

    def __init__(self, tmp: Path, model: "House | None" = None):
        """Builds the house in `tmp`; with a `model`, copies that one, which is quicker."""
        self.tmp, self.root = tmp, tmp / "house"
        self.widget = self.root / "third_party" / "widget"
        self.patches = self.root / "patches" / "widget"
        self.origin = tmp / "mirror" / "acme" / "widget.git"
        self.config = tmp / "gitconfig"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("OGDM_", "GIT_"))}
        self.env |= {
            "GIT_CONFIG_GLOBAL": str(self.config), "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@a.invalid",
            "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@a.invalid",
        }  # fmt: skip
        if model:
            shutil.copytree(model.tmp, tmp, symlinks=True, dirs_exist_ok=True)
            self.pin = model.pin
        self.redirect(self.origin)
        if not model:
            self.pin = self._make_upstream()
            self._make_root()

    def sparse(self) -> None:
        """Leaves assets/ out of the checkout."""
        with (self.root / ".gitmodules").open("a") as file:
            file.write("\tsparse = /*\n\tsparse = !/assets/\n")

    def redirect(self, place) -> None:
        """Makes git look for the upstream's address somewhere else."""
        self.config.write_text(f'[protocol "file"]\n\tallow = always\n[url "{place}"]\n\tinsteadOf = {URL}\n')

    def git(self, *args, cwd=None) -> str:
        return shell("git", *args, cwd=cwd or self.root, env=self.env)

    def _make_upstream(self) -> str:
        work = self.tmp / "upstream"
        (work / "lib").mkdir(parents=True)
        (work / "assets").mkdir()
        (work / "assets" / "picture.gif").write_text("large, and read by nobody\n")
        self.git("init", "-q", cwd=work)
        self.git("add", ".", cwd=work)
        self.git("commit", "-q", "-m", "early", cwd=work)
        (work / "train.py").write_text(TRAIN)
        (work / "lib" / "model.py").write_text(MODEL)
        self.git("add", ".", cwd=work)
        self.git("commit", "-q", "-m", "pinned", cwd=work)
        pin = self.git("rev-parse", "HEAD", cwd=work).strip()
        (work / "train.py").write_text(TRAIN + "a later line\n")
        self.git("commit", "-q", "-a", "-m", "later", cwd=work)
        self.origin.parent.mkdir(parents=True)
        self.git("clone", "-q", "--bare", work, self.origin, cwd=self.tmp)
        return pin

    def _make_root(self) -> None:
        shutil.copytree(ROOT / "run" / "setup", self.root / "run" / "setup")
        names = ("run/__init__.py", "run/provenance.py", "ogdm_core/__init__.py", "ogdm_core/__init__.pyi",
                 "ogdm_core/lock.py")  # fmt: skip
        (self.root / "ogdm_core").mkdir()
        for name in names:  # all that run/setup imports
            shutil.copy(ROOT / name, self.root / name)
        settings = ("path = third_party/widget", f"url = {URL}", "ignore = dirty", "extra = wid")
        (self.root / ".gitmodules").write_text("\n\t".join(['[submodule "third_party/widget"]', *settings]) + "\n")
        self.write_patch("train.py", TRAIN, {5: ["added to train"]})
        self.write_patch("lib/model.py", MODEL, {0: ["first"], 10: ["last", ""]})
        self.git("init", "-q", cwd=self.tmp / "house")
        self.git("update-index", "--add", "--cacheinfo", f"160000,{self.pin},third_party/widget")
        (self.root / ".gitignore").write_text(".setup/\n__pycache__/\n")
        self.git("add", ".gitignore", ".gitmodules", "run", "ogdm_core", "patches")
        self.git("commit", "-q", "-m", "house")

    def write_patch(self, path: str, old: str, added: dict, prose: str = REASON) -> Path:
        """A patch for `path`, with `added` = {after line: [lines]}; the diff is git's own."""
        scratch = self.tmp / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / path).parent.mkdir(parents=True)
        self.git("init", "-q", cwd=scratch)
        (scratch / path).write_text(old)
        self.git("add", ".", cwd=scratch)
        (scratch / path).write_text(insert(old, added))
        diff = self.git("diff", "-U0", "--full-index", cwd=scratch)
        diff = re.sub(r"^(@@ [^@]+ @@).*$", r"\1", diff, flags=re.MULTILINE)
        file = self.patches / file_name(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{prose}\n\n{diff}")
        return file

    def setup(self, *args, **env) -> subprocess.CompletedProcess:
        """run/setup.sh's Python, without making an environment."""
        given = [] if any(a.startswith("--") for a in args) else ["--no-env"]
        return subprocess.run(
            [sys.executable, self.root / "run" / "setup", *given, *args],
            cwd=self.tmp, env=self.env | env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def ok(self, *args, **env) -> str:
        """What a setup that succeeds says."""
        done = self.setup(*args, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def refused(self, *args, status=1, **env) -> str:
        """What a setup that ends with `status` says about it."""
        done = self.setup(*args, **env)
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def snapshot(self) -> dict[str, bytes]:
        """Every file of the submodule's work tree."""
        files = (file for file in self.widget.rglob("*") if file.is_file() and ".git" not in file.parts)
        return {str(file.relative_to(self.widget)): file.read_bytes() for file in files}


def insert(text: str, added: dict[int, list[str]]) -> str:
    """`text` with lines added after the given line numbers."""
    out = list(added.get(0, []))
    for number, line in enumerate(text.splitlines(), start=1):
        out += [line, *added.get(number, [])]
    return "".join(f"{line}\n" for line in out)


@pytest.fixture(scope="module")
def model_house(tmp_path_factory):
    return House(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="module")
def model_patched(tmp_path_factory, model_house):
    house = House(tmp_path_factory.mktemp("patched"), model_house)
    done = house.setup()
    assert done.returncode == 0, done.stderr
    return house


@pytest.fixture
def house(tmp_path, model_house):
    return House(tmp_path, model_house)


@pytest.fixture
def patched_house(tmp_path, model_patched):
    return House(tmp_path, model_patched)
