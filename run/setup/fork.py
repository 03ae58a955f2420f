"""Our lines in other trees than the pinned one: a fork of the user's, upstream's next commit, a branch of commits.

A hunk finds its place by a hash of the lines around it. patches/NAME/places has one line per hunk,

    PATH AFTER RADIUS HASH

where HASH is of the RADIUS lines before and behind line AFTER of the pinned file: the smallest RADIUS with which it
occurs once. So a file that was shifted or edited elsewhere still takes the hunk, and nothing of upstream is quoted.
"""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from . import Refusal, git, upstream
from .patches import Patch, PatchError, blob
from .upstream import State, Submodule

RADII = (3, 4, 6, 9, 14, 20)
FILE = "places"
BRANCH = "ogdm"
Place = tuple[int, str]  # radius, hash
Misfit = tuple[str, int, str, list[str]]  # file, line of the pinned file, why, the lines to add


def hashes(content: bytes, radius: int) -> list[str]:
    """A hash for each place between two lines of a file, and for its two ends; line ends do not count."""
    edge = [b"\0"] * radius
    lines = [*edge, *(line.rstrip() for line in content.splitlines()), *edge]
    windows = (b"\n".join(lines[i : i + 2 * radius]) for i in range(len(lines) - 2 * radius + 1))
    return [hashlib.sha256(window).hexdigest()[:16] for window in windows]


def places(sub: Submodule) -> str:
    """The text of patches/NAME/places."""
    found = []
    for path, patch in sub.patches().items():
        every = {radius: hashes(sub.original(path), radius) for radius in RADII}
        for after in sorted(patch.hunks):
            radius = next((r for r in RADII if every[r].count(every[r][after]) == 1), RADII[-1])
            found.append(f"{path} {after} {radius} {every[radius][after]}\n")
    return "".join(found)


def read_places(sub: Submodule) -> dict[tuple[str, int], Place]:
    """{(path, after): (radius, hash)}."""
    file = sub.folder / FILE
    if not file.is_file():
        raise Refusal(f"there is no patches/{sub.name}/{FILE}; `run/setup.sh --export {sub.name}` writes it")
    rows = [line.rsplit(" ", 3) for line in file.read_text().splitlines()]
    return {(path, int(after)): (int(radius), digest) for path, after, radius, digest in rows}


def carry(patch: Patch, found: dict[tuple[str, int], Place], content: bytes) -> tuple[bytes, list[Misfit]]:
    """A file with every hunk that finds its place in it or is there already, and the hunks that do not."""
    if blob(content) == patch.old:
        return patch.apply(content), []
    lines, left, at = content.splitlines(keepends=True), [], {}
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    for after, added in patch.hunks.items():
        radius, digest = found.get((patch.path, after), (1, ""))
        matches = [i for i, h in enumerate(hashes(content, radius)) if h == digest]
        if len(matches) == 1:
            at[matches[0]] = added
        elif matches or b"".join(line.encode() + end for line in added) not in content:
            why = "the lines around it have changed" if not matches else f"{len(matches)} places look like it"
            left.append((patch.path, after, why, added))
    for i in sorted(at, reverse=True):
        if i and not lines[i - 1].endswith(b"\n"):
            lines[i - 1] += end
        lines[i:i] = [line.encode() + end for line in at[i]]
    return b"".join(lines), left


def gone(patch: Patch) -> list[Misfit]:
    """All hunks of a patch whose file is not there."""
    return [(patch.path, after, "there is no such file", added) for after, added in patch.hunks.items()]


def listed(left: Iterable[Misfit], pin: str) -> str:
    """The hunks that found no place, with the lines to add by hand."""
    return "\n".join(
        f"  {path}, behind line {after} of commit {pin[:10]}: {why}\n" + "\n".join(f"    +{line}" for line in added)
        for path, after, why, added in left
    )


# ---- --into PATH ------------------------------------------------------------------------------------------------


def into(sub: Submodule, root: Path, as_branch: bool = False) -> None:
    """Adds our lines to a clone or fork at `root`, in its files or as a branch of commits: all of them, or none."""
    if not root.is_dir():
        raise Refusal(f"--into {root}: there is no such folder; give a clone or fork of {sub.name}")
    found, contents, left = read_places(sub), {}, []
    for path, patch in sub.patches().items():
        if not (root / path).is_file():
            left += gone(patch)
            continue
        before = (root / path).read_bytes()
        after, misfits = carry(patch, found, before)
        left += misfits
        if after != before:
            contents[path] = after
    if left:
        raise Refusal(
            f"{root} was left as it is; these hunks find no place in it:\n{listed(left, sub.pin)}\n"
            "Add their lines by hand, then run the same command again, for the others. `run/setup.sh --diff "
            f"{sub.name}` says what they are for."
        )
    if not contents:
        print(f"{root} has the lines of patches/{sub.name} already")
    elif as_branch:
        if edited := git.text("status", "--porcelain", "--", *contents, cwd=root):
            raise Refusal(f"{root} was left as it is; commit or stash your edits of these files first:\n{edited}")
        branch(sub, root, "HEAD", contents)
    else:
        for path, content in contents.items():
            upstream.write(root / path, content)
        print(f"{root}: our lines are in {len(contents)} files; `git -C {root} diff` shows them")
        print(f"They import ogdm_core: export PYTHONPATH={sub.root}")


# ---- --branch ---------------------------------------------------------------------------------------------------


def branch(sub: Submodule, root: Path, base: str, contents: dict[str, bytes]) -> None:
    """Makes the branch `ogdm` on `base`: a commit per patch, whose message is its reason. Touches no work tree."""
    with contextlib.suppress(git.GitError):
        git.run("rev-parse", "--verify", "--quiet", f"refs/heads/{BRANCH}", cwd=root)
        raise Refusal(f"{root} has a branch {BRANCH} already; rename it: git -C {root} branch -m {BRANCH} NAME")
    with tempfile.TemporaryDirectory() as scratch:
        tree, file = Path(scratch, "tree"), Path(scratch, "content")
        git.run("worktree", "add", "--quiet", "--detach", "--no-checkout", tree, base, cwd=root)
        try:
            git.run("read-tree", "HEAD", cwd=tree)
            for path, patch in sub.patches().items():
                if path in contents:
                    file.write_bytes(contents[path])
                    mode = git.text("ls-files", "--stage", "--", path, cwd=tree).split()[0]
                    new = git.text("hash-object", "-w", "--no-filters", file, cwd=tree)
                    git.run("update-index", "--cacheinfo", f"{mode},{new},{path}", cwd=tree)
                    git.run("commit", "--quiet", "--no-verify", "--message", patch.prose, cwd=tree)
            git.run("branch", BRANCH, "HEAD", cwd=tree)
        finally:
            git.run("worktree", "remove", "--force", tree, cwd=root)
    print(f"{root}: branch {BRANCH}, {len(contents)} commits; `git -C {root} log {BRANCH}` shows them")


def branch_of_pin(sub: Submodule) -> None:
    """The same on the pinned commit in third_party/NAME."""
    if not (sub.path / ".git").exists():
        raise Refusal(f"{sub.label} is not here; `run/setup.sh {sub.name}` fetches it")
    branch(sub, sub.path, sub.pin, sub.results())


# ---- --update COMMIT --------------------------------------------------------------------------------------------


def update(sub: Submodule, commit: str) -> None:
    """Moves the pin to a commit, with the patches that fit it. May be interrupted, and repeated.

    Where hunks find no place, the work tree stands at the commit with all the others, and the same command goes on
    once the lines were added by hand.
    """
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise Refusal(f"--update {commit}: give the whole name of the commit, 40 digits")
    new, report, found = replace(sub, pin=commit), upstream.inspect(sub), read_places(sub)
    if report.head != commit:
        if report.state not in (State.MISSING, State.CLEAN, State.PATCHED, State.OUTDATED):
            raise Refusal(report.problem)
        if report.head:
            upstream.reverse(sub)
        upstream.fetch(new)
    left = []
    for path, patch in sub.patches().items():
        try:
            original = new.original(path)
        except PatchError:
            left += gone(patch)
            continue
        content, misfits = carry(patch, found, original)
        if (sub.path / path).read_bytes() == original:
            upstream.write(sub.path / path, content)
        if (sub.path / path).read_bytes() == content:  # nobody has added the others by hand
            left += misfits
    if left:
        raise Refusal(
            f"{sub.label} is at {commit[:10]} with all hunks but {len(left)}, which find no place there:\n"
            f"{listed(left, sub.pin)}\nAdd their lines in {sub.label}, as the new code wants them, or `git rm` a patch "
            "whose file is gone,\nand run the same command again. To go back instead:\n"
            f"    git -C {sub.label} checkout --force {sub.pin}; run/setup.sh {sub.name}"
        )
    export(new)
    git.run("update-index", "--cacheinfo", f"160000,{commit},{sub.label}", cwd=sub.root)
    print(f"{sub.label}: the pin is {commit[:10]}; run the tests, then commit it with patches/{sub.name}")


def export(sub: Submodule) -> None:
    """upstream.export, and the places of what it wrote."""
    upstream.export(sub)
    file, text = sub.folder / FILE, places(sub)
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
        print(f"wrote patches/{sub.name}/{FILE}")
