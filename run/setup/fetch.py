"""Fetches one submodule at its pinned commit: shallow, without unneeded blobs, resumable.

The result is what `git submodule update --init` leaves (a git directory under .git/modules, a
detached head at the pin), minus history and minus the files that `SPARSE` leaves out.
"""

from __future__ import annotations

import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import git
from .submodules import SPARSE, Submodule, Unreachable

_ON_DISK = "file://"


def sources(sub: Submodule) -> list[str]:
    """Where to look for the repository: the mirror's likely places, else its own address."""
    mirror = os.environ.get("OGDM_MIRROR", "").rstrip("/")
    if not mirror:
        return [sub.url]
    owner, name = sub.url.removesuffix(".git").split("/")[-2:]
    places = [
        f"{owner}/{name}.git", f"{owner}/{name}", f"{name}.git", name,
        f"{owner}+{name}/repo", f"{owner}+{name}.git", f"{owner}+{name}",
    ]  # fmt: skip
    folder = Path(mirror.removeprefix(_ON_DISK)).expanduser()
    if mirror.startswith(_ON_DISK) or folder.is_dir() or mirror.startswith(("/", ".", "~")):
        found = [folder / place for place in places if _is_repository(folder / place)]
        return [_ON_DISK + str(place.resolve()) for place in found[:1]]
    return [f"{mirror}/{place}" for place in places]


def _is_repository(folder: Path) -> bool:
    return (folder / "HEAD").is_file() or (folder / ".git" / "HEAD").is_file()


def probe(sub: Submodule) -> str | Unreachable:
    """The first source that answers, or why none does; at most ten seconds a source."""
    candidates = sources(sub)
    if not candidates:
        return Unreachable(f"{os.environ['OGDM_MIRROR']} holds no copy of {sub.url}")
    for source in candidates:
        try:
            folder = _local_path(source, sub)
            pack = [f"--upload-pack={_upload_pack(folder)}"] if folder else []
            git.run(*_serving(source, sub), "ls-remote", *pack, source, "HEAD",
                    cwd=sub.root, timeout=git.PROBE_SECONDS)  # fmt: skip
            return source
        except git.GitError as error:
            why = Unreachable(f"{source}: {_reason(error)}")
            if "seconds" in str(error):  # a host that does not answer will not answer six times
                break
    return why


def probe_all(subs: list[Submodule]) -> dict[str, str | Unreachable]:
    """Probes side by side, so that a dead network costs one timeout and not three."""
    with ThreadPoolExecutor() as pool:
        return dict(zip((sub.name for sub in subs), pool.map(probe, subs), strict=True))


def _reason(error: Exception) -> str:
    """The line of git's message that says why, without the address, which is told already."""
    lines = str(error).splitlines() or ["no reason given"]
    reasons = [line for line in lines if line.startswith(("fatal", "error"))]
    return re.sub(r"^(fatal|error): (unable to access '.*?': )?", "", (reasons or lines)[0])


def _local_path(source: str, sub: Submodule) -> str | None:
    """The folder behind a source, after the user's own `insteadOf` rules; None for a server."""
    address = git.text("ls-remote", "--get-url", source, cwd=sub.root)
    if address.startswith(_ON_DISK):
        return address.removeprefix(_ON_DISK)
    return address if Path(address).is_absolute() else None


def _upload_pack(folder: str) -> str:
    """A server process for a folder that allows what GitHub allows: filters, fetches by commit.

    A mirror on a cluster often belongs to somebody else, hence safe.directory.
    """
    return shlex.join([
        "git", "-c", "uploadpack.allowFilter=true", "-c", "uploadpack.allowAnySHA1InWant=true",
        "-c", f"safe.directory={folder}", "-c", f"safe.directory={folder}/.git", "upload-pack",
    ])  # fmt: skip


def _serving(source: str, sub: Submodule) -> list[str]:
    """git options for reading from a source that may be a folder."""
    if _local_path(source, sub) is None:
        return []
    return ["-c", "protocol.file.allow=always"]


def fetch(sub: Submodule, source: str) -> None:
    """Brings the pinned commit into third_party/NAME; may be interrupted and repeated."""
    git_dir = sub.git_dir()
    sub.path.mkdir(parents=True, exist_ok=True)
    if not (git_dir / "HEAD").is_file():
        git_dir.mkdir(parents=True, exist_ok=True)
        git.run("init", "--quiet", "--bare", git_dir, cwd=sub.root)
    configure = {
        "ogdm.fetching": "true",
        "core.bare": "false",
        "core.worktree": os.path.relpath(sub.path.resolve(), git_dir),
        "remote.origin.url": source,
        "remote.origin.fetch": "+refs/heads/*:refs/remotes/origin/*",
    }
    folder = _local_path(source, sub)
    if folder is not None:
        configure["remote.origin.uploadpack"] = _upload_pack(folder)
    for key, value in configure.items():
        git.run("--git-dir", git_dir, "config", key, value, cwd=sub.root)
    (sub.path / ".git").write_text(f"gitdir: {os.path.relpath(git_dir, sub.path.resolve())}\n")
    for lock in ("index.lock", "shallow.lock", "HEAD.lock"):  # left by an interrupted fetch of ours
        (git_dir / lock).unlink(missing_ok=True)
    _narrow(sub, git_dir)
    _download(sub, source)
    try:
        git.run(*_serving(source, sub), "checkout", "--quiet", "--force", "--detach", sub.pin,
                cwd=sub.path)  # fmt: skip
    except git.GitError as error:
        raise Unreachable(f"{source}: {_reason(error)}") from None
    git.run("submodule", "--quiet", "init", "--", sub.label, cwd=sub.root)
    git.run("config", "--unset-all", "ogdm.fetching", cwd=sub.path)


def _narrow(sub: Submodule, git_dir: Path) -> None:
    """Leaves files out of the checkout that nobody here reads."""
    patterns = SPARSE.get(sub.name)
    if not patterns:
        return
    git.run("config", "core.sparseCheckout", "true", cwd=sub.path)
    git.run("config", "core.sparseCheckoutCone", "false", cwd=sub.path)
    (git_dir / "info").mkdir(exist_ok=True)
    (git_dir / "info" / "sparse-checkout").write_text("\n".join(patterns) + "\n")


def _download(sub: Submodule, source: str) -> None:
    """The pinned commit alone if the server can do that, else its branches."""
    if git.attempt("cat-file", "-e", f"{sub.pin}^{{tree}}", cwd=sub.path) is not None:
        return
    options = [*_serving(source, sub), "fetch", "--quiet", "--no-tags", "--filter=blob:none"]
    try:
        git.run(*options, "--depth=1", "origin", sub.pin, cwd=sub.path)
    except git.GitError:
        try:
            git.run(*options, "origin", cwd=sub.path)
        except git.GitError as error:
            raise Unreachable(f"{source}: {_reason(error)}") from None
    if git.attempt("cat-file", "-e", sub.pin, cwd=sub.path) is None:
        raise Unreachable(f"{source} does not have the pinned commit {sub.pin}")
