"""Writes an edited submodule back to patches/NAME.

Whose edit is it? A file belongs to the one patch that touches it; that patch keeps its prose and
gets a new diff. A file that no patch touches gets a patch of its own. A file that several patches
touch must be as they leave it: an edit there could belong to any of them, so it is refused.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from . import git
from .patches import FILL_IN, SERIES, Change, Patch, PatchError, parse, same_blob
from .submodules import (
    Refusal,
    State,
    Submodule,
    explain,
    hash_file,
    inspect,
    rehearse,
    write_record,
)

TEMPLATE = f"""\
{FILL_IN}: why this patch exists, what it makes upstream do.

{FILL_IN}: why our own tree, a subclass or a hook would not do instead.
"""


@dataclass
class Outcome:
    """What an export did to the series."""

    written: list[str]
    removed: list[str]
    unexplained: list[str]  # new patches whose prose is still to be written


def export(sub: Submodule) -> Outcome:
    """Rewrites the series from the work tree, or raises Refusal with nothing written."""
    report = inspect(sub)
    if report.state not in (State.CLEAN, State.PATCHED, State.OUTDATED, State.HALF, State.DIRTY):
        raise Refusal(explain(report))
    changes = {path: _change(sub, path) for path in _edited(sub)}
    old = sub.patches()
    new = _assign(sub, old, changes)
    with rehearse(sub, _staged(sub, new)) as stage:
        for path in changes:
            if hash_file(stage / path) != hash_file(sub.path / path):
                raise Refusal(f"{path}: the exported series would not give back what is there")
    return _write(sub, old, new, changes)


def _edited(sub: Submodule) -> list[str]:
    names = git.run("diff", "HEAD", "--name-only", "--no-renames", "-z", cwd=sub.path)
    new = [path for change in sub.patches() for path in _created(change)]
    edited = names.decode().split("\0")
    edited += [path for path in new if (sub.path / path).is_file()]
    return sorted({path for path in edited if path})


def _created(patch: Patch) -> list[str]:
    return [change.path for change in patch.changes if change.creates]


def _change(sub: Submodule, path: str) -> Change:
    """The file's difference from the pinned commit, as a part of a patch."""
    index = _scratch(sub) / "index"  # a copy: the user's own staging stays as it is
    shutil.copyfile(Path(sub.git("rev-parse", "--absolute-git-dir")) / "index", index)
    own = {"GIT_INDEX_FILE": str(index)}
    git.run("add", "--intent-to-add", "--", path, cwd=sub.path, **own)  # a new file shows up, too
    raw = git.run(
        "-c", "core.quotePath=false", "diff", "HEAD", "--unified=0", "--inter-hunk-context=0",
        "--minimal", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv",
        "--src-prefix=a/", "--dst-prefix=b/", "--", path, cwd=sub.path, **own,
    ).decode()  # fmt: skip
    taken_out = _removed_lines(raw)
    if taken_out:
        shown = "\n".join(f"    line {number}: {line}" for number, line in taken_out[:5])
        more = f"\n    and {len(taken_out) - 5} more" if len(taken_out) > 5 else ""
        raise Refusal(
            f"{sub.label}/{path} changes or removes lines of upstream's:\n{shown}{more}\n"
            "A patch only adds lines. Put upstream's line back, and let an added line rebind or\n"
            "wrap what must behave differently. Nothing was written."
        )
    bare = re.sub(r"^(@@ [^@]+ @@).*$", r"\1", raw, flags=re.MULTILINE)
    try:
        (change,) = parse(bare, sub.folder / path).changes
    except PatchError as error:
        raise Refusal(f"{sub.label}/{path} cannot become a patch: {error}") from None
    return change


def _removed_lines(raw: str) -> list[tuple[int, str]]:
    """(line number, text) of what a diff takes out of the old file."""
    found, number, in_hunk = [], 0, False
    for line in raw.split("\n"):
        header = re.match(r"@@ -(\d+)", line)
        if header:
            number, in_hunk = int(header[1]), True
        elif in_hunk and line.startswith("-"):
            found.append((number, line[1:]))
            number += 1
    return found


def _assign(sub: Submodule, old: list[Patch], changes: dict[str, Change]) -> list[Patch]:
    """The new series: the old patches with their files' new diffs, then one for each new file."""
    owners = {path: [p for p in old if any(c.path == path for c in p.changes)] for path in changes}
    for path, patches in owners.items():
        if len(patches) > 1:
            last = [c for c in patches[-1].changes if c.path == path][-1]
            if not same_blob(changes[path].new, last.new):
                names = ", ".join(patch.name for patch in patches)
                raise Refusal(
                    f"{path} is touched by several patches ({names}),\n"
                    "so the edit could be any of theirs. Make one patch of them, or edit by hand.\n"
                    "Nothing was written."
                )
    series = []
    for patch in old:
        kept = []
        for change in patch.changes:
            now = changes.get(change.path)
            if len(owners.get(change.path, [])) > 1 or (now and now.hunks == change.hunks):
                kept.append(change)
            elif now:
                kept.append(now)
        if kept:
            series.append(replace(patch, changes=tuple(kept)))
    for path, change in changes.items():
        if not owners[path]:
            file = sub.folder / f"{len(series) + 1:04d}-{path.replace('/', '-')}.patch"
            series.append(Patch(file, TEMPLATE.strip(), (change,)))
    return series


def _text(patch: Patch) -> str:
    return patch.prose + "\n\n" + "".join(change.text for change in patch.changes)


def _scratch(sub: Submodule) -> Path:
    """A folder for the exporter's drafts, in the submodule's git directory."""
    folder = Path(sub.git("rev-parse", "--absolute-git-dir")) / "ogdm-export"
    folder.mkdir(exist_ok=True)
    return folder


def _staged(sub: Submodule, series: list[Patch]) -> list[Patch]:
    """The same patches as files outside patches/, to try them before anything is overwritten."""
    staged = []
    for patch in series:
        file = _scratch(sub) / patch.name
        file.write_bytes(_text(patch).encode())
        staged.append(replace(patch, file=file))
    return staged


def _write(
    sub: Submodule, old: list[Patch], new: list[Patch], changes: dict[str, Change]
) -> Outcome:
    sub.folder.mkdir(parents=True, exist_ok=True)
    before = {patch.name: patch.file.read_bytes() for patch in old}
    written = []
    for patch in new:
        content = _text(patch).encode()
        if before.get(patch.name) != content:
            patch.file.write_bytes(content)
            written.append(patch.name)
    names = [patch.name for patch in new]
    removed = [patch.name for patch in old if patch.name not in names]
    for name in removed:
        (sub.folder / name).unlink()
    if names != [patch.name for patch in old]:
        (sub.folder / SERIES).write_text("".join(f"{name}\n" for name in names))
    write_record(sub, {path: change.new for path, change in changes.items()})
    return Outcome(written, removed, [patch.name for patch in new if FILL_IN in patch.prose])
