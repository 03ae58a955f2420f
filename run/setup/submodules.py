"""The upstream codebases: the state of each, and how it is fetched, patched, put back, exported.

Only files whose content is known are ever replaced: the pinned commit's, a patch's result, or what
an earlier run wrote (it keeps a record of that). Any other file is an edit, and is left alone.
"""

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ogdm_core.files import atomic_write
from run.provenance import ROOT

from . import git
from .patches import FILL_IN, Patch, PatchError, blob, file_name, load, parse, read

EXTRAS = {"guided-diffusion": "adm", "edm": "edm", "latent-diffusion": "ldm"}
ALIASES = {extra: name for name, extra in EXTRAS.items()}
# Left out of the checkout: pictures and one index file, 240 of 250 MB, that no trainer here reads.
SPARSE = {"latent-diffusion": ("/*", "!/assets/", "!/data/imagenet_train_hr_indices.p")}
PROBE_SECONDS, FETCH_SECONDS = 10, 1800

TEMPLATE = f"""\
{FILL_IN}: why this patch exists, what it makes upstream do.

{FILL_IN}: why our own tree, a subclass or a hook would not do instead.
"""


class Refusal(Exception):
    """Setup does not go on, and touched nothing. The message says what to do."""


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

    def patches(self) -> dict[str, Patch]:
        """The patches by upstream file; raises PatchError, also where a patch file was lost."""
        listed = []
        if (self.root / ".git").exists():  # git knows which patches there should be
            lost = git.text("ls-files", "--deleted", "--", self.folder, cwd=self.root)
            listed = lost.splitlines()
        if listed or not self.folder.is_dir():
            lost = listed[0] if listed else f"patches/{self.name}"
            raise PatchError(
                f"{lost} is not there, so {self.label} would be left without its lines.\n"
                f"`git checkout -- {lost}` brings it back; `git rm {lost}` takes it out for good."
            )
        return {patch.path: patch for patch in load(self.folder)}

    def git(self, *words: str | Path) -> str:
        """stdout of git in the submodule."""
        return git.text(*words, cwd=self.path)

    def original(self, path: str) -> bytes:
        """A file of the pinned commit."""
        try:
            return git.run("cat-file", "blob", f"{self.pin}:{path}", cwd=self.path)
        except git.GitError:
            raise PatchError(f"{self.label} has no file {path} at {self.pin[:10]}") from None

    def blob(self, path: str) -> str | None:
        """The blob name of a file as it stands; None if there is none."""
        file = self.path / path
        return blob(file.read_bytes()) if file.is_file() else None

    def results(self) -> dict[str, bytes]:
        """Every patched file's content, blobs verified; changes nothing, raises PatchError."""
        return {path: p.apply(self.original(path)) for path, p in self.patches().items()}

    @property
    def record(self) -> Path:
        """The file that says which blobs setup wrote last; it lies in the git directory."""
        return Path(self.git("rev-parse", "--absolute-git-dir")) / "ogdm-applied.json"


@dataclass
class Report:
    """What stands in third_party/NAME. `problem` says why setup leaves it alone, and what to do."""

    submodule: Submodule
    state: State
    problem: str = ""
    head: str | None = None
    changed: list[str] = field(default_factory=list)  # files that differ from the commit
    edited: list[str] = field(default_factory=list)  # those of them that setup did not write
    untracked: list[str] = field(default_factory=list)

    @property
    def explanation(self) -> str:
        """The problem, or what setup would do."""
        todo = f"{self.submodule.label}: {self.state.value}; `run/setup.sh {self.submodule.name}`"
        return self.problem or f"{todo} sets it up."


def discover(root: Path = ROOT) -> dict[str, Submodule]:
    """The submodules by name, from .gitmodules and the commits pinned in the index."""
    if not (root / ".git").exists():
        raise Refusal(
            "this folder is not a git clone, so the pinned commits are unknown.\n"
            "Clone the repository with git instead of unpacking an archive."
        )
    found = {}
    for line in git.text("ls-files", "--stage", "--", "third_party", cwd=root).splitlines():
        mode, pin, _, path = line.split(maxsplit=3)
        if mode == "160000":
            key = f"submodule.{path}.url"
            url = git.text("config", "--file", ".gitmodules", "--get", key, cwd=root)
            found[Path(path).name] = Submodule(Path(path).name, url, pin, root)
    return found


def select(names: list[str], root: Path = ROOT) -> list[Submodule]:
    """The submodules called `names` (adm and ldm are understood); all of them for no name."""
    known = discover(root)
    chosen = {}
    for name in names or known:
        name = ALIASES.get(name, name.removeprefix("third_party/").rstrip("/"))
        if name not in known:
            names = ", ".join(dict.fromkeys([*known, *ALIASES]))
            raise Refusal(f"there is no submodule {name!r}; known: {names}")
        chosen[name] = known[name]
    return list(chosen.values())


def inspect(sub: Submodule) -> Report:
    """Finds out the state of a submodule; changes nothing and downloads nothing."""
    there = (sub.path / ".git").exists()
    # A checkout sets HEAD last, so without one a fetch was interrupted.
    head = git.attempt("rev-parse", "--verify", "--quiet", "HEAD", cwd=sub.path) if there else None
    again = f"and run `run/setup.sh {sub.name}` again."
    if not head and sub.path.is_symlink():
        return Report(sub, State.FOREIGN, f"{sub.label} is a symbolic link to "
                      f"{sub.path.readlink()}, where git finds no commit.\n"
                      f"Remove the link {again}")  # fmt: skip
    if not there and sub.path.is_dir() and any(sub.path.iterdir()):
        return Report(sub, State.FOREIGN, f"{sub.label} holds files but is no git checkout, so its "
                      f"commit cannot be verified.\nMove it away {again}")  # fmt: skip
    if not head:
        return Report(sub, State.MISSING)
    raw = git.run("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all",
                  "--ignore-submodules=none", cwd=sub.path)  # fmt: skip
    entries = [(line[:2], line[3:]) for line in raw.decode().split("\0") if line]
    untracked = [path for code, path in entries if code == "??"]
    blobs = {path: sub.blob(path) for code, path in entries if code != "??"}
    wanted, written = {path: p.new for path, p in sub.patches().items()}, kept(sub.record)
    edited = [path for path, have in blobs.items()
              if have is None or have not in (wanted.get(path), written.get(path))]  # fmt: skip
    report = Report(sub, State.CLEAN, "", head, list(blobs), edited, untracked)
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


def kept(file: Path) -> dict:
    """What an earlier run wrote to a JSON file; {} where it is absent or damaged."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


# ---- fetching ------------------------------------------------------------------------------------


def source(sub: Submodule) -> tuple[str, list[str]]:
    """Where the repository answers, in OGDM_MIRROR or at its own address, and how to ask there."""
    mirror = os.environ.get("OGDM_MIRROR", "").rstrip("/")
    if mirror and "://" not in mirror:
        mirror = f"file://{Path(mirror).expanduser().resolve()}"
    owner, name = sub.url.removesuffix(".git").split("/")[-2:]
    places = [f"{mirror}/{path}{end}" for path in (f"{owner}/{name}", name) for end in (".git", "")]
    for address in places if mirror else [sub.url]:
        try:
            options = _serving(sub, address)
            git.run("ls-remote", *options, address, "HEAD",
                    cwd=sub.root, network=True, seconds=PROBE_SECONDS)  # fmt: skip
            return address, options
        except git.GitError as error:
            why = _unreachable(address, error)
            if "seconds" in str(error):  # a host that does not answer once will not answer later
                break
    raise Unreachable(f"{mirror} holds no copy of {sub.url}: {why}") if mirror else why


def _unreachable(address: str, error: git.GitError) -> Unreachable:
    """The line of git's message that says why, without the address, which is named already."""
    lines = str(error).splitlines()
    reason = next((line for line in lines if line.startswith(("fatal", "error"))), lines[0])
    reason = re.sub(r"^(fatal|error): (unable to access '.*?': )?", "", reason)
    return Unreachable(f"{address}: {reason}")


def _serving(sub: Submodule, address: str) -> list[str]:
    """Options that make a folder serve what GitHub serves: filters, and commits by name.

    A mirror on a cluster often belongs to somebody else, hence safe.directory. A partial clone,
    such as a copy of a third_party/NAME from here, is refused: it lacks blobs; asked for one, git
    fetches it from the clone's own origin, and where that leads back to the clone, without end.
    """
    # the address after `insteadOf` rules
    folder = Path(git.text("ls-remote", "--get-url", address, cwd=sub.root).removeprefix("file://"))
    if not folder.is_absolute():  # another machine
        return []
    key = r"^(extensions\.partialclone|remote\..*\.(promisor|partialclonefilter))$"
    for config in (folder / "config", folder / ".git" / "config"):
        if git.attempt("config", "--file", config, "--get-regexp", key, cwd=sub.root):
            raise Unreachable(
                f"{folder} is a partial clone, which lacks files; make a whole one with `git clone --mirror {sub.url}`"
            )
    settings = ["uploadpack.allowFilter=true", "uploadpack.allowAnySHA1InWant=true",
                f"safe.directory={folder}", f"safe.directory={folder}/.git"]  # fmt: skip
    words = ["git", *(word for setting in settings for word in ("-c", setting)), "upload-pack"]
    return [f"--upload-pack={shlex.join(words)}"]


def fetch(sub: Submodule, address: str, options: list[str]) -> None:
    """Brings the pinned commit into third_party/NAME; may be interrupted and repeated.

    The result is what `git submodule update --init` leaves, without history, and without the files
    that SPARSE leaves out, whose blobs are not even downloaded.
    """
    git_dir = Path(git.text("rev-parse", "--git-path", f"modules/{sub.label}", cwd=sub.root))
    git_dir = (sub.root / git_dir).resolve()
    git.run("init", "--quiet", "--bare", git_dir, cwd=sub.root)
    sub.path.mkdir(parents=True, exist_ok=True)
    (sub.path / ".git").write_text(f"gitdir: {os.path.relpath(git_dir, sub.path.resolve())}\n")
    for lock in ("index.lock", "shallow.lock", "HEAD.lock"):  # left by an interrupted fetch
        (git_dir / lock).unlink(missing_ok=True)
    settings = {
        "core.bare": "false",
        "core.worktree": os.path.relpath(sub.path.resolve(), git_dir),
        "remote.origin.url": address,
        "remote.origin.fetch": "+refs/heads/*:refs/remotes/origin/*",
    }
    for option in options:  # the checkout reads blobs from there, too
        settings["remote.origin.uploadpack"] = option.removeprefix("--upload-pack=")
    for key, value in settings.items():
        git.run("--git-dir", git_dir, "config", key, value, cwd=sub.root)
    if sub.name in SPARSE:
        sub.git("sparse-checkout", "set", "--no-cone", *SPARSE[sub.name])
    git.run("submodule", "--quiet", "init", "--", sub.label, cwd=sub.root)
    remote = {"cwd": sub.path, "network": True, "seconds": FETCH_SECONDS}
    get = ("fetch", "--quiet", "--no-tags")
    part = ("--depth=1", "--filter=blob:none") if sub.name in SPARSE else ("--depth=1",)
    try:
        try:
            git.run(*get, *part, "origin", sub.pin, **remote)
        except git.GitError:  # an old server does not serve a commit by its name, but its branches
            # Without the filter: it makes git fetch each absent parent of a shallow server's
            # commits by itself, which asks for that parent again, without end.
            for key in ("promisor", "partialclonefilter"):
                git.attempt("config", "--unset", f"remote.origin.{key}", cwd=sub.path)
            git.run(*get, "origin", **remote)
        if git.attempt("cat-file", "-e", sub.pin, cwd=sub.path) is None:
            raise Unreachable(f"{address} does not have the pinned commit {sub.pin}")
        git.run("checkout", "--quiet", "--force", "--detach", sub.pin, **remote)
    except git.GitError as error:
        raise _unreachable(address, error) from None


# ---- patching ------------------------------------------------------------------------------------


def apply(sub: Submodule) -> Report:
    """Makes the patched files what patches/ says, all of them or none."""
    contents = sub.results()
    reverse(sub)
    _replace(sub.record, json.dumps({path: blob(c) for path, c in contents.items()}).encode())
    for path, content in contents.items():
        _replace(sub.path / path, content)
    return inspect(sub)


def _replace(file: Path, content: bytes) -> None:
    """Writes a file whole or not at all, with its mode if it is there."""
    with atomic_write(file, sync=False) as fresh:
        fresh.write(content)
        if file.exists():
            shutil.copymode(file, fresh.name)


def reverse(sub: Submodule) -> list[str]:
    """Takes our lines out again, unless a file was edited; returns the files put back."""
    report = inspect(sub)
    if report.head is None or report.edited:
        raise Refusal(report.explanation)
    if report.changed:
        sub.git("checkout", "--quiet", "HEAD", "--", *report.changed)
    sub.record.unlink(missing_ok=True)
    return report.changed


def export(sub: Submodule) -> tuple[list[Path], list[Path]]:
    """Writes the edited submodule to patches/NAME: `git diff -U0` below the prose that is there.

    Returns the files (written, removed); raises Refusal with nothing written.
    """
    report = inspect(sub)
    if report.head != sub.pin or not report.changed:
        raise Refusal(report.explanation)
    wanted, applied = {path: p.new for path, p in sub.patches().items()}, kept(sub.record)
    if applied and (other := sorted(set(wanted.items()) ^ set(applied.items()))):
        raise Refusal(
            f"patches/{sub.name}/{file_name(other[0][0])} is not what was applied to {sub.label}: "
            "it came or changed since,\nperhaps with a pull, and an export would undo that. "
            f"Nothing was written.\nIf no edits of yours are in there, `run/setup.sh {sub.name}` "
            "applies it. Else keep them apart first:\n"
            f"    git -C {sub.label} diff > edits.diff\n"
            f"    git -C {sub.label} checkout HEAD -- .\n"
            f"    run/setup.sh {sub.name}"
        )
    texts = {}
    for path in report.changed:
        file = sub.folder / file_name(path)
        prose = read(file).prose if file.is_file() else TEMPLATE.strip()
        texts[file] = f"{prose}\n\n{_diff(sub, path)}"
        try:
            parse(texts[file], file.name).apply(sub.original(path))  # gives back what is there
        except PatchError as error:
            raise Refusal(f"{sub.label}/{path} cannot become a patch: {error}") from None
    sub.folder.mkdir(parents=True, exist_ok=True)
    removed = [file for file in sorted(sub.folder.glob("*.patch")) if file not in texts]
    written = [f for f, text in texts.items() if not f.is_file() or f.read_text() != text]
    for file in removed:  # for git, too, or the file would count as lost
        git.run("rm", "--quiet", "--force", "--ignore-unmatch", "--", file, cwd=sub.root)
        file.unlink(missing_ok=True)
    for file in written:
        file.write_bytes(texts[file].encode())
    _replace(sub.record, json.dumps({path: sub.blob(path) for path in report.changed}).encode())
    return written, removed


def _diff(sub: Submodule, path: str) -> str:
    """What the work tree adds to a file, as the law wants it; refuses anything but added lines."""
    raw = git.run(
        "-c", "core.quotePath=false", "diff", "HEAD", "--unified=0", "--inter-hunk-context=0",
        "--minimal", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv",
        "--src-prefix=a/", "--dst-prefix=b/", "--", path, cwd=sub.path,
    ).decode()  # fmt: skip
    taken, number = [], 0
    for line in raw.split("\n"):
        if header := re.match(r"@@ -(\d+)", line):
            number = int(header[1])
        elif number and line.startswith("-"):
            taken.append(f"    line {number}: {line[1:]}")
            number += 1
    if taken:
        more = f"\n    and {len(taken) - 5} more" if len(taken) > 5 else ""
        raise Refusal(
            f"{sub.label}/{path} changes or removes lines of upstream's:\n"
            + "\n".join(taken[:5]) + more +
            "\nA patch only adds lines. Put upstream's line back, and let an added line rebind or\n"
            "wrap what must behave differently. Nothing was written."
        )  # fmt: skip
    return re.sub(r"^(@@ [^@]+ @@).*$", r"\1", raw, flags=re.MULTILINE)
