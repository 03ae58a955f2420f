"""The upstream codebases: the state of each, and how it is fetched, patched, put back, exported.

Setup replaces only files whose content it knows: the pinned commit's, a patch's result, or what an
earlier run wrote. A record in the git directory names the blobs that were written, because a pull
may have replaced the patch since. Any other file is an edit, and is left alone.
"""

import contextlib
import json
import os
import re
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from run.provenance import ROOT

from . import Refusal, git, read_json_or_empty, say
from .patches import Patch, PatchError, blob, file_name, load, parse, read

PROBE_SECONDS, FETCH_SECONDS = 10, 1800
# What a local copy serves: all that GitHub does, also where somebody else owns the copy.
UPLOAD_PACK = "git -c 'safe.directory=*' -c uploadpack.allowFilter=true upload-pack"
FILL_IN = "FILL IN"  # stands in the prose of a freshly exported patch until its author writes it
TEMPLATE = f"""\
{FILL_IN}: why this patch exists, what it makes upstream do.

{FILL_IN}: why our own tree, a subclass or a hook would not do instead."""


class Unreachable(Exception):
    """A submodule could not be fetched."""


class State(Enum):
    """What stands in third_party/NAME."""

    MISSING = "not here"
    FOREIGN = "not a git checkout"
    WRONG_COMMIT = "at another commit"
    CLEAN = "as upstream, not patched"
    PATCHED = "patched"
    OUTDATED = "not patched as patches/ says"
    EDITED = "edited"


@dataclass(frozen=True)
class Submodule:
    """One upstream codebase."""

    name: str
    url: str
    pin: str  # the commit
    extra: str  # of pyproject.toml; also a second name
    sparse: tuple[str, ...]  # patterns of the files to check out; none: all of them
    optional: bool  # fetched only by its name
    label: str  # the path as a user types it: third_party/NAME
    root: Path  # of this repository
    path: Path  # the work tree
    folder: Path  # patches/NAME

    @property
    def record(self) -> Path:
        """The JSON file {path: blob} of what setup wrote last; it lies in the submodule's git directory."""
        return Path(self.git("rev-parse", "--absolute-git-dir")) / "ogdm-applied.json"

    def git(self, *words: str | Path) -> str:
        """stdout of git in the submodule."""
        return git.text(*words, cwd=self.path)

    def patches(self) -> dict[str, Patch]:
        """The patches by upstream file; raises PatchError, also where a patch file was lost."""
        lost = "" if self.folder.is_dir() else f"patches/{self.name}"
        if (self.root / ".git").exists():  # git knows which patches there should be
            lost = git.text("ls-files", "--deleted", "--", self.folder, cwd=self.root).partition("\n")[0] or lost
        if lost:
            raise PatchError(
                f"{lost} is not there, so {self.label} would be left without its lines.\n"
                f"`git checkout -- {lost}` brings it back; `git rm {lost}` takes it out for good."
            )
        return {patch.path: patch for patch in load(self.folder)}

    def original(self, path: str) -> bytes:
        """A file of the pinned commit."""
        try:
            return git.run("cat-file", "blob", f"{self.pin}:{path}", cwd=self.path)
        except git.GitError:
            raise PatchError(f"{self.label} has no file {path} at {self.pin[:10]}") from None

    def results(self) -> dict[str, bytes]:
        """Every patched file's content, blobs verified; changes nothing, raises PatchError."""
        return {path: p.apply(self.original(path)) for path, p in self.patches().items()}


@dataclass
class Report:
    """What stands in third_party/NAME. `problem` says why setup leaves it alone, and what to do."""

    state: State
    problem: str = ""
    head: str = ""
    changed: dict[str, str | None] = field(default_factory=dict)  # files that differ from the commit's: blobs
    edited: list[str] = field(default_factory=list)  # those of them that setup did not write
    untracked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line on a submodule."""
        words = self.state.value
        if self.state is State.PATCHED:
            count = len(self.changed)
            words = f"patched, {count} {'file' if count == 1 else 'files'}" if count else "no patches"
        return words + (f", commit {self.head[:10]}" if self.head else "")


def mention_untracked(report: Report, remark: str) -> None:
    """Prints the files that upstream does not have, such as a trainer's output."""
    if report.untracked:
        more = f" and {len(report.untracked) - 3} more" if len(report.untracked) > 3 else ""
        print(f"    untracked files, {remark}: {', '.join(report.untracked[:3])}{more}")


def discover(root: Path = ROOT) -> dict[str, Submodule]:
    """The submodules by name, from .gitmodules and the commits pinned in the index."""
    if not (root / ".git").exists():
        raise Refusal(
            "this folder is not a git clone, so the pinned commits are unknown.\n"
            "Clone the repository with git instead of unpacking an archive."
        )
    settings: dict[str, list[str]] = defaultdict(list)
    for entry in git.text("config", "--file", ".gitmodules", "--null", "--list", cwd=root).split("\0"):
        key, _, value = entry.partition("\n")
        settings[key].append(value)
    found = {}
    for line in git.text("ls-files", "--stage", "--", "third_party", cwd=root).splitlines():
        mode, pin, _, path = line.split(maxsplit=3)
        if mode == "160000":
            name = Path(path).name
            keys = ("url", "extra", "sparse", "optional")
            (url,), extra, sparse, optional = (settings[f"submodule.{path}.{key}"] for key in keys)
            places = (path, root, root / path, root / "patches" / name)
            found[name] = Submodule(name, url, pin, *(extra or [name]), tuple(sparse), optional == ["true"], *places)
    return found


def select(names: list[str], root: Path = ROOT) -> list[Submodule]:
    """The submodules called `names`, by folder or by extra; `all` is each of them.

    For no name, those that are not optional, or are here already.
    """
    subs = discover(root).values()
    if names == ["all"]:
        return list(subs)
    usual = [sub for sub in subs if not sub.optional or (sub.path / ".git").exists()]
    known = {name: sub for sub in subs for name in (sub.name, sub.label, sub.extra)}
    if unknown := [name for name in names if name.rstrip("/") not in known]:
        names = ", ".join(dict.fromkeys(name for sub in subs for name in (sub.name, sub.extra)))
        raise Refusal(f"there is no submodule {unknown[0]!r}; known: {names}")
    return list(dict.fromkeys(known[name.rstrip("/")] for name in names)) or usual


def inspect(sub: Submodule) -> Report:
    """Finds out the state of a submodule; changes nothing."""
    there, head = (sub.path / ".git").exists(), ""
    with contextlib.suppress(git.GitError):  # a checkout sets HEAD last; without one it was interrupted
        head = sub.git("rev-parse", "--verify", "HEAD") if there else ""
    again = f"and run `run/setup.sh {sub.name}` again."
    if not head and sub.path.is_symlink():
        problem = f"{sub.label} is a symbolic link to {sub.path.readlink()}, where git finds no commit."
        return Report(State.FOREIGN, f"{problem}\nRemove the link {again}")
    if not there and sub.path.is_dir() and any(sub.path.iterdir()):
        problem = f"{sub.label} holds files but is no git checkout, so its commit cannot be verified."
        return Report(State.FOREIGN, f"{problem}\nMove it away {again}")
    if not head:
        return Report(State.MISSING)
    flags = ("--porcelain", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=none")
    raw = git.run("status", *flags, cwd=sub.path).decode()
    entries = [(line[:2], line[3:]) for line in raw.split("\0") if line]
    untracked = [path for code, path in entries if code == "??"]
    files = [sub.path / path for code, path in entries if code != "??"]
    blobs = {str(f.relative_to(sub.path)): blob(f.read_bytes()) if f.is_file() else None for f in files}
    wanted, written = {path: p.new for path, p in sub.patches().items()}, read_json_or_empty(sub.record)
    known = {path: (wanted.get(path), written.get(path)) for path in blobs}
    edited = [path for path, have in blobs.items() if have is None or have not in known[path]]
    report = Report(State.CLEAN, "", head, blobs, edited, untracked)
    if head != sub.pin:
        report.state = State.WRONG_COMMIT
        also = f" Edited files: {', '.join(edited)}." if edited else ""
        report.problem = (
            f"{sub.label} is at {head[:10]}, this repository pins {sub.pin[:10]}.{also}\n"
            f"If no work of yours is in there:\n"
            f"    run/setup.sh --reverse {sub.name}    (if it is patched)\n"
            f"    git submodule update --checkout {sub.label}\n"
            f"    run/setup.sh {sub.name}\n"
            f"To pin the other commit instead, see 'Moving a pin' in CONTRIBUTING.md."
        )
    elif edited:
        report.state = State.EDITED
        names = "".join(f"    {path}\n" for path in edited[:10])
        more = f"    and {len(edited) - 10} more\n" if len(edited) > 10 else ""
        report.problem = (
            f"{sub.label} was edited; these files are neither upstream's nor our patches':\n"
            f"{names}{more}"
            f"To keep the edits as patches:   run/setup.sh --export {sub.name}\n"
            f"To throw them away:             git -C {sub.label} checkout HEAD -- ."
        )
    elif blobs == wanted:
        report.state = State.PATCHED
    elif blobs:
        report.state = State.OUTDATED
    return report


def fetch(sub: Submodule) -> None:
    """Brings the pinned commit into third_party/NAME, without history; may be interrupted and repeated.

    With sparse patterns, the files that are left out are not even downloaded.
    """
    address = source(sub)
    say(f"Fetching {sub.label} at {sub.pin[:10]} from {address}")
    try:
        local = git.text("ls-remote", "--get-url", address, cwd=sub.root).startswith(("/", "file://"))
        if not local:
            git.run("ls-remote", address, "HEAD", cwd=sub.root, seconds=PROBE_SECONDS)
        if (sub.path / ".git").is_file():  # of an interrupted `git submodule update`
            (sub.path / ".git").unlink()
        git.run("init", "--quiet", sub.path, cwd=sub.root)
        for lock in sub.record.parent.glob("*.lock"):  # left by an interrupted fetch
            lock.unlink()
        sub.git("config", "remote.origin.url", address)
        sub.git("config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*")
        if sub.sparse:
            sub.git("sparse-checkout", "set", "--no-cone", *sub.sparse)
        git.run("submodule", "--quiet", "init", "--", sub.label, cwd=sub.root)
        server = ("-c", f"remote.origin.uploadpack={UPLOAD_PACK}") if local else ()
        part = ("--depth=1", "--filter=blob:none") if sub.sparse else ("--depth=1",)
        where = {"cwd": sub.path, "seconds": FETCH_SECONDS}
        git.run(*server, "fetch", "--quiet", "--no-tags", *part, "origin", sub.pin, **where)
        git.run(*server, "checkout", "--quiet", "--force", "--detach", sub.pin, **where)
        sub.git("config", "remote.origin.url", sub.url)  # the mirror served this once
    except git.GitError as error:
        if "not our ref" in str(error):
            raise Unreachable(f"{address} does not have the pinned commit {sub.pin}") from None
        lines = str(error).splitlines()
        reason = next((line for line in lines if line.startswith(("fatal", "error"))), lines[0])
        reason = re.sub(r"^(fatal|error): (unable to access '.*?': )?", "", reason)
        raise Unreachable(f"{address}: {reason}") from None


def source(sub: Submodule) -> str:
    """The address to fetch from: a clone in the folder OGDM_MIRROR, or the upstream's own."""
    mirror = os.environ.get("OGDM_MIRROR")
    if not mirror:
        return sub.url
    owner, name = sub.url.removesuffix(".git").split("/")[-2:]
    folder = Path(mirror.removeprefix("file://")).expanduser().resolve()
    for place in (f"{owner}/{name}.git", f"{owner}/{name}", f"{name}.git", name):
        if (folder / place).is_dir():
            return f"file://{folder / place}"
    raise Unreachable(f"OGDM_MIRROR={mirror} holds no copy of {sub.url}, as {owner}/{name} or {name}")


def apply(sub: Submodule) -> Report:
    """Makes the patched files what patches/ says, all of them or none; leaves an edited tree alone."""
    report = inspect(sub)
    if report.problem:
        raise Refusal(report.problem)
    if report.state is State.PATCHED:
        return report
    contents = sub.results()
    if report.changed:
        sub.git("checkout", "--quiet", "HEAD", "--", *report.changed)
    sub.record.write_text(json.dumps({path: blob(content) for path, content in contents.items()}))
    for path, content in contents.items():
        write(sub.path / path, content)
    return inspect(sub)


def write(file: Path, content: bytes) -> None:
    """Replaces a file, with its mode; an interruption leaves no half-written one, which would count as edited."""
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(content)
    shutil.copymode(file, part)
    os.replace(part, file)


def reverse(sub: Submodule) -> None:
    """Takes our lines out again, unless a file was edited."""
    report = inspect(sub)
    if report.edited or report.state is State.FOREIGN:
        raise Refusal(report.problem)
    if report.changed:
        sub.git("checkout", "--quiet", "HEAD", "--", *report.changed)
    if report.head:
        sub.record.unlink(missing_ok=True)
    print(f"{sub.label}: {f'as upstream, {len(report.changed)} files put back' if report.head else 'not here'}")
    mention_untracked(report, "left as they are")


def export(sub: Submodule) -> None:
    """Writes the edited submodule to patches/NAME: `git diff -U0` below the prose that is there.

    Says what it wrote; raises Refusal with nothing written.
    """
    report = inspect(sub)
    if report.head != sub.pin or not report.changed:
        raise Refusal(report.problem or f"{sub.label}: {report.state.value}; `run/setup.sh {sub.name}` sets it up.")
    wanted, applied = {path: p.new for path, p in sub.patches().items()}, read_json_or_empty(sub.record)
    if applied and (other := sorted(set(wanted.items()) ^ set(applied.items()))):
        raise Refusal(
            f"patches/{sub.name}/{file_name(other[0][0])} is not what was applied to {sub.label}: it changed since, "
            "perhaps with a pull,\nand an export would undo that. Nothing was written. "
            f"If no edits of yours are in there, `run/setup.sh {sub.name}` applies it.\nElse keep them apart first:\n"
            f"    git -C {sub.label} diff > edits.diff; git -C {sub.label} checkout HEAD -- .; run/setup.sh {sub.name}"
        )
    texts = {}
    for path in report.changed:
        file = sub.folder / file_name(path)
        texts[file] = f"{read(file).prose if file.is_file() else TEMPLATE}\n\n{_diff(sub, path)}"
        try:
            parse(texts[file], file.name).apply(sub.original(path))  # gives back what is there
        except PatchError as error:
            raise Refusal(f"{sub.label}/{path} cannot become a patch; nothing was written.\n{error}") from None
    removed = [file for file in sorted(sub.folder.glob("*.patch")) if file not in texts]
    written = {file: text for file, text in texts.items() if not file.is_file() or file.read_text() != text}
    for file in removed:  # for git, too, or the file would count as lost
        git.run("rm", "--quiet", "--force", "--ignore-unmatch", "--", file, cwd=sub.root)
        file.unlink(missing_ok=True)
        print(f"removed patches/{sub.name}/{file.name}: nothing of it is left in the submodule")
    for file, text in written.items():
        file.write_bytes(text.encode())
        todo = "; now write the reason at its top" if FILL_IN in text else ""
        print(f"wrote patches/{sub.name}/{file.name}{todo}")
    if not written and not removed:
        print(f"patches/{sub.name} is up to date")
    sub.record.write_text(json.dumps(report.changed))
    mention_untracked(report, "not exported; a new file belongs in our own tree")


def _diff(sub: Submodule, path: str) -> str:
    """What the work tree changes in a file, without the function names behind the second @@."""
    context = ("--unified=0", "--inter-hunk-context=0", "--minimal", "--full-index", "--no-renames")
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
    raw = git.run("-c", "core.quotePath=false", "diff", "HEAD", *context, *plain, "--", path, cwd=sub.path)
    return re.sub(r"^(@@ [^@]+ @@).*$", r"\1", raw.decode(), flags=re.MULTILINE)
