"""The upstream codebases: what state each is in, and how it is fetched, patched and put back.

Nothing here overwrites a line that is not upstream's or ours. A file is replaced only when its blob
is one that the pinned commit or the patch series accounts for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from . import git
from .patches import Change, Patch, load_series, same_blob

ROOT = Path(__file__).resolve().parents[2]
ALIASES = {"adm": "guided-diffusion", "ldm": "latent-diffusion"}
EXTRAS = {"guided-diffusion": "adm", "edm": "edm", "latent-diffusion": "ldm"}
RECORD = "ogdm-applied.json"  # in the submodule's git directory: the blobs that we wrote

# Left out of the checkout: pictures and one index file, 240 of 250 MB, that no trainer here reads.
SPARSE = {"latent-diffusion": ("/*", "!/assets/", "!/data/imagenet_train_hr_indices.p")}


class Refusal(Exception):
    """Setup will not go on; nothing was touched. The message says what to do."""


class Unreachable(Exception):
    """A submodule could not be fetched."""


class State(Enum):
    """What stands in third_party/NAME."""

    MISSING = "not here"
    UNFINISHED = "fetch was interrupted"
    FOREIGN = "not a git checkout"
    WRONG_COMMIT = "at another commit"
    CLEAN = "as upstream, not patched"
    PATCHED = "patched"
    OUTDATED = "patched with an earlier series"
    HALF = "half patched"
    DIRTY = "edited"


@dataclass(frozen=True)
class Submodule:
    """One upstream codebase."""

    name: str
    url: str
    pin: str
    root: Path = ROOT

    @property
    def path(self) -> Path:
        """The work tree."""
        return self.root / "third_party" / self.name

    @property
    def folder(self) -> Path:
        """The folder with its patches."""
        return self.root / "patches" / self.name

    @property
    def label(self) -> str:
        """The path as a user types it."""
        return f"third_party/{self.name}"

    def patches(self) -> list[Patch]:
        """The series, parsed."""
        return load_series(self.folder)

    def git(self, *args: str | Path) -> str:
        """stdout of git in the submodule."""
        return git.text(*args, cwd=self.path)

    def git_dir(self) -> Path:
        """Where git keeps a submodule's repository, also when it is not there yet."""
        place = git.text("rev-parse", "--git-path", f"modules/{self.label}", cwd=self.root)
        return (self.root / place).resolve()

    def blob(self, path: str) -> bytes:
        """A file of the pinned commit."""
        return git.run("cat-file", "blob", f"{self.pin}:{path}", cwd=self.path)


@dataclass
class Report:
    """The state of one submodule, with what is worth saying about it."""

    submodule: Submodule
    state: State
    head: str | None = None
    applied: int = 0  # patches that are in
    total: int = 0
    files: list[str] = field(default_factory=list)  # the files that make it DIRTY
    untracked: list[str] = field(default_factory=list)


def discover(root: Path = ROOT) -> dict[str, Submodule]:
    """The submodules by name, from .gitmodules and the commits pinned in the index."""
    if not (root / ".git").exists():
        raise Refusal(
            "this folder is not a git clone, so the pinned commits are unknown.\n"
            "Clone the repository with git instead of unpacking an archive."
        )
    listed = git.text("ls-files", "--stage", "--", "third_party", cwd=root)
    pins = {}
    for line in listed.splitlines():
        mode, commit, _, path = line.split(maxsplit=3)
        if mode == "160000":
            pins[path] = commit
    found = {}
    for path, pin in pins.items():
        key = f"submodule.{path}.url"
        url = git.text("config", "--file", ".gitmodules", "--get", key, cwd=root)
        found[Path(path).name] = Submodule(Path(path).name, url, pin, root)
    return found


def select(names: list[str], root: Path = ROOT) -> list[Submodule]:
    """The submodules called `names` (adm and ldm are understood); all of them for no name."""
    known = discover(root)
    chosen = []
    for name in names or known:
        name = ALIASES.get(name, name.removeprefix("third_party/").rstrip("/"))
        if name not in known:
            raise Refusal(f"there is no submodule {name!r}; known: {', '.join([*known, *ALIASES])}")
        if known[name] not in chosen:
            chosen.append(known[name])
    return chosen


def inspect(sub: Submodule) -> Report:
    """Finds out the state of a submodule; changes nothing."""
    if not (sub.path / ".git").exists():
        foreign = sub.path.is_dir() and any(sub.path.iterdir())
        return Report(sub, State.FOREIGN if foreign else State.MISSING)
    if git.attempt("config", "--bool", "ogdm.fetching", cwd=sub.path) == "true":
        return Report(sub, State.UNFINISHED)
    head = git.attempt("rev-parse", "--verify", "--quiet", "HEAD", cwd=sub.path)
    if head != sub.pin:
        return Report(sub, State.WRONG_COMMIT if head else State.UNFINISHED, head)
    series = sub.patches()
    report = Report(sub, State.CLEAN, head, total=len(series))
    chains = _chains(series)
    changed, report.untracked = _status(sub, chains)
    if not changed:
        report.state = State.PATCHED if not series else State.CLEAN
        return report
    blobs = {path: hash_file(sub.path / path) for path in changed}
    report.applied = sum(_is_in(patch, blobs, chains) for patch in series)
    strangers = [path for path in changed if _step(chains.get(path, []), blobs[path]) is None]
    if not strangers and report.applied == len(series):
        report.state = State.PATCHED
    elif blobs == read_record(sub):
        report.state = State.OUTDATED
    elif not strangers:
        report.state = State.HALF
    else:
        report.state, report.files = State.DIRTY, strangers
    return report


def _chains(series: list[Patch]) -> dict[str, list[Change]]:
    """For each upstream file the changes made to it, in order."""
    chains: dict[str, list[Change]] = {}
    for patch in series:
        for change in patch.changes:
            chains.setdefault(change.path, []).append(change)
    return chains


def _status(sub: Submodule, chains: dict[str, list[Change]]) -> tuple[list[str], list[str]]:
    """(files that differ from the pinned commit, untracked files that are none of ours)."""
    raw = git.run("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all",
                  "--ignore-submodules=none", cwd=sub.path)  # fmt: skip
    changed, untracked = [], []
    for entry in raw.decode().split("\0"):
        if entry:
            code, path = entry[:2], entry[3:]
            (untracked if code == "??" and path not in chains else changed).append(path)
    return changed, untracked


def _step(chain: list[Change], blob: str | None) -> int | None:
    """How many changes of the chain a file with this blob has had; None if it is a stranger's."""
    if not chain or blob is None:
        return None
    for count in range(len(chain), 0, -1):
        if same_blob(chain[count - 1].new, blob):
            return count
    return None


def _is_in(patch: Patch, blobs: dict[str, str | None], chains: dict[str, list[Change]]) -> bool:
    """Whether every file of the patch has had it."""
    for change in patch.changes:
        chain = chains[change.path]
        had = _step(chain, blobs.get(change.path)) or 0
        if had <= chain.index(change):
            return False
    return True


def hash_file(file: Path) -> str | None:
    """The blob name of a file as it stands; None if there is none."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def read_record(sub: Submodule) -> dict[str, str]:
    """The blobs that setup wrote into the work tree last."""
    record = Path(sub.git("rev-parse", "--absolute-git-dir")) / RECORD
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return {}


def write_record(sub: Submodule, blobs: dict[str, str]) -> None:
    """Remembers what setup wrote, so that a later series can replace it without asking."""
    record = Path(sub.git("rev-parse", "--absolute-git-dir")) / RECORD
    record.write_text(json.dumps(blobs, indent=1))


@contextmanager
def rehearse(sub: Submodule, series: list[Patch]):
    """Applies the series to the pinned files in a scratch folder and yields it.

    Every blob is compared with the one its patch names, before and after. What fails here has not
    touched the submodule.
    """
    with tempfile.TemporaryDirectory(prefix="ogdm-") as scratch:
        stage = Path(scratch)
        for path, chain in _chains(series).items():
            if not chain[0].creates:
                _fetch_original(sub, path, stage, series)
        for patch in series:
            apply_patch(patch, stage)
        yield stage


def _fetch_original(sub: Submodule, path: str, stage: Path, series: list[Patch]) -> None:
    file = stage / path
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.write_bytes(sub.blob(path))
    except git.GitError:
        patch = next(p for p in series if any(c.path == path for c in p.changes))
        raise Refusal(
            f"{patch.name} is for {path}, which {sub.label} does not have at {sub.pin[:10]}"
        ) from None


def apply_patch(patch: Patch, folder: Path) -> None:
    """`git apply` of one patch to plain files, with the blobs checked before and after."""
    for change in patch.changes:
        have = hash_file(folder / change.path)
        if change.creates:
            if have:
                raise Refusal(f"{patch.name} creates {change.path}, which exists already")
        elif not have or not same_blob(change.old, have):
            raise Refusal(
                f"{patch.name} is for blob {change.old[:10]} of {change.path}, "
                f"but here it is {(have or 'missing')[:10]}.\n"
                "The patch was made for another upstream commit or another order of the series; "
                "see 'Moving a pin' in CONTRIBUTING.md"
            )
    try:
        # Without a ceiling, git would look for a repository around the folder and skip files.
        git.run("apply", "--unidiff-zero", "--whitespace=nowarn", patch.file.resolve(),
                cwd=folder, GIT_CEILING_DIRECTORIES=str(folder.resolve().parent))  # fmt: skip
    except git.GitError as error:
        raise Refusal(f"{patch.name} does not apply: {error}") from None
    for change in patch.changes:
        have = hash_file(folder / change.path)
        if not have or not same_blob(change.new, have):
            raise Refusal(
                f"{patch.name} should leave blob {change.new[:10]} of {change.path}, "
                f"but leaves {(have or 'nothing')[:10]}; it was edited by hand. "
                f"`run/setup.sh --export` writes it anew"
            )


def apply(sub: Submodule) -> Report:
    """Applies the series to a clean work tree; all of it or nothing."""
    series = sub.patches()
    with rehearse(sub, series) as stage:
        blobs = {}
        for path in _chains(series):
            blobs[path] = hash_file(stage / path)
        write_record(sub, blobs)
        for path in blobs:
            _replace(sub.path / path, (stage / path).read_bytes())
    return inspect(sub)


def _replace(file: Path, content: bytes) -> None:
    """Writes a file in one step, its mode kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.ogdm")
    fresh.write_bytes(content)
    if file.exists():
        shutil.copymode(file, fresh)
    os.replace(fresh, file)


def reverse(sub: Submodule) -> list[str]:
    """Takes our lines out of the files whose blob is known, and no others; returns those files."""
    report = inspect(sub)
    ours = read_record(sub) if report.state in (State.OUTDATED, State.WRONG_COMMIT) else {}
    if report.state is State.WRONG_COMMIT:
        here = {path: hash_file(sub.path / path) for path in ours}
        if not ours or here != ours:
            raise Refusal(explain(report))
    elif report.state in (State.PATCHED, State.HALF):
        ours = dict.fromkeys(_chains(sub.patches()), "")
    elif report.state is State.CLEAN:
        return []
    elif report.state is not State.OUTDATED:
        raise Refusal(explain(report))
    tracked = set(git.text("ls-files", "-z", cwd=sub.path).split("\0"))
    back = [path for path in ours if path in tracked]
    if back:
        sub.git("checkout", "--quiet", "HEAD", "--", *back)
    for path in set(ours) - tracked:
        (sub.path / path).unlink(missing_ok=True)
    write_record(sub, {})
    return list(ours)


def explain(report: Report) -> str:
    """Why setup leaves this submodule alone, and what its owner can do."""
    sub = report.submodule
    if report.state is State.FOREIGN:
        return (
            f"{sub.label} holds files but is no git checkout, so its commit cannot be verified.\n"
            f"Move it away and run `run/setup.sh {sub.name}` again."
        )
    if report.state is State.WRONG_COMMIT:
        return (
            f"{sub.label} is at {report.head[:10]}, this repository pins {sub.pin[:10]}.\n"
            f"If no work of yours is in there:\n"
            f"    run/setup.sh --reverse {sub.name}    (if it is patched)\n"
            f"    git submodule update --checkout {sub.label}\n"
            f"    run/setup.sh {sub.name}\n"
            f"To pin the other commit instead, see 'Moving a pin' in CONTRIBUTING.md."
        )
    if report.state is State.HALF:
        return (
            f"{sub.label} has {report.applied} of {report.total} patches, the others are not in.\n"
            f"All of its changes are ours, so it is safe to start over:\n"
            f"    run/setup.sh --reverse {sub.name} && run/setup.sh {sub.name}"
        )
    if report.state is State.DIRTY:
        names = "\n".join(f"    {path}" for path in report.files[:10])
        more = f"\n    and {len(report.files) - 10} more" if len(report.files) > 10 else ""
        return (
            f"{sub.label} was edited; these files are neither upstream's nor our patches':\n"
            f"{names}{more}\n"
            f"To keep the edits as patches:   run/setup.sh --export {sub.name}\n"
            f"To throw them away:             git -C {sub.label} checkout HEAD -- ."
        )
    if report.state is State.OUTDATED:
        return f"{sub.label} has an earlier series; `run/setup.sh {sub.name}` brings it up to date."
    return f"{sub.label}: {report.state.value}; `run/setup.sh {sub.name}` sets it up."
