"""The law of patches: one per upstream file, insert-only, zero context, opening with a reason.

Reading the files needs no submodule. Where one is here, its patches are also applied and reversed.
"""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from run.setup.patches import PatchError, file_name, load, parse, read
from run.setup.upstream import FILL_IN, State, Submodule, apply, discover, inspect, reverse

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(folder.name for folder in (ROOT / "patches").iterdir())
MOST_LINES = 40  # a patch calls our code; one that is longer has logic in it
MIN_WORDS = 15  # two short sentences; less than this is a title, not a reason

GOOD = f"""\
Say why this patch exists, in words enough that a stranger sees the point of it at once.

diff --git a/train.py b/train.py
index {"3f5f3ee9" * 5}..{"9a1b2c37" * 5} 100644
--- a/train.py
+++ b/train.py
@@ -12,0 +13,2 @@
+two added
+lines
@@ -20,0 +23 @@
+one more
"""


def offences(folder: Path) -> list[str]:
    """Everything in patches/NAME that breaks the law."""
    found = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if file == folder / "places":  # hashes, which quote nothing
            rows = file.read_text().splitlines()
            found += [f"places: {row}" for row in rows if not re.fullmatch(r"[\w./-]+ \d+ \d+ [0-9a-f]{16}", row)]
            continue
        try:
            patch = read(file)
        except PatchError as error:
            found.append(str(error))
            continue
        if file != folder / file_name(patch.path):
            found.append(f"{file.name} is for {patch.path}; call it {file_name(patch.path)}")
        if FILL_IN in patch.prose or len(patch.prose.split()) < MIN_WORDS:
            found.append(f"{file.name} does not open with its reason, at least {MIN_WORDS} words of it")
    return found


def test_every_folder_is_for_a_submodule():
    assert set(NAMES) <= set(discover(ROOT))


@pytest.mark.parametrize("name", NAMES)
def test_patches_obey_the_law(name):
    folder = ROOT / "patches" / name
    assert offences(folder) == []
    for patch in load(folder):
        assert len(patch.added) <= MOST_LINES, f"{patch.name}: move logic to ogdm_core"
        assert "othing gentler would do" in patch.prose, patch.name
        assert any("ogdm" in line for line in patch.added), f"{patch.name} never calls ogdm_core"


def test_a_good_patch_reads_well():
    patch = parse(GOOD, "edm/train.py.patch")
    assert patch.prose.startswith("Say why")
    assert (patch.path, patch.old[:7], patch.new[:7]) == ("train.py", "3f5f3ee", "9a1b2c3")
    assert patch.hunks == {12: ["two added", "lines"], 20: ["one more"]}


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("+two added\n", "-upstream's line\n", '8: unexpected "-upstream\'s line"'),
        ("+one more\n", " upstream's line\n", '11: unexpected " upstream\'s line"'),
        ("@@ -12,0 +13,2 @@", "@@ -12,0 +13,2 @@ def main():", "nothing behind the second @@"),
        ("@@ -12,0 +13,2 @@", "@@ -12 +13,2 @@", "`+` lines only"),
        ("@@ -12,0 +13,2 @@", "@@ -12,0 +13,3 @@", "should be ['@@ -12,0 +13,2 @@',"),
        ("@@ -20,0 +23 @@", "@@ -20,0 +21 @@", "'@@ -20,0 +23 @@']"),
        ("@@ -20,0 +23 @@", "@@ -11,0 +14 @@", "should be ['@@ -11,0 +12 @@',"),
        ("+one more\n", "+one more\n\\ No newline at end of file\n", "12: unexpected"),
        ("+one more\n", "+one more\ndiff --git a/b.py b/b.py\n", "no second file"),
        ("index 3f5f3ee93f", "index 3f", "in full"),
        ("index ", "old mode 100644\nnew mode 100755\nindex ", "no changed mode"),
        ("a/train.py b/train.py", "a/train.py b/new.py", "renamed"),
        ("--- a/train.py", "--- /dev/null", "no created"),
        ("+++ b/train.py", "+++ /dev/null", "deleted"),
        ("diff --git a/train.py b/train.py\n", "", "one `diff --git`"),
        (GOOD[GOOD.index("diff --git") :], "", "does not hold a patch"),
    ],
)
def test_a_bad_patch_is_refused(old, new, complaint):
    assert old in GOOD
    with pytest.raises(PatchError, match="^edm/train.py.patch[: ]") as caught:
        parse(GOOD.replace(old, new, 1), "edm/train.py.patch")
    assert complaint in str(caught.value)


# ---- with the submodules -----------------------------------------------------------------------


@pytest.fixture
def copied(submodule, tmp_path):
    """copied(name) -> the Submodule in a house of its own, so that the real one stays untouched."""

    def get(name: str) -> Submodule:
        sub = submodule(name)
        place = tmp_path / "third_party" / name
        shutil.copytree(sub.record.parent, place / ".git")
        (place / ".git" / sub.record.name).unlink(missing_ok=True)
        copy = dataclasses.replace(sub, root=tmp_path, path=place)
        for config in {"config", "config.worktree"} & {f.name for f in (place / ".git").iterdir()}:
            command = ["git", "config", "--file", place / ".git" / config]
            subprocess.run([*command, "core.worktree", place], cwd=tmp_path, check=True)
        copy.git("checkout", "--quiet", "--force", "--detach", sub.pin)
        return copy

    return get


def status(sub: Submodule) -> str:
    return sub.git("status", "--porcelain", "--ignored", "--untracked-files=all")


@pytest.mark.parametrize("name", NAMES)
def test_patches_apply_and_reverse_without_a_trace(copied, name):
    sub = copied(name)
    assert status(sub) == ""
    assert apply(sub).state is State.PATCHED
    numstat = [line.split() for line in sub.git("diff", "--numstat").splitlines()]
    assert {path for _, _, path in numstat} == set(sub.patches())
    assert {removed for _, removed, _ in numstat} == {"0"}
    ours = {path: (sub.path / path).read_bytes() for path in sub.patches()}
    reverse(sub)
    assert status(sub) == ""
    assert inspect(sub).state is State.CLEAN
    sub.git("apply", "--unidiff-zero", *sorted(sub.folder.glob("*.patch")))
    assert ours == {path: (sub.path / path).read_bytes() for path in ours}, "git disagrees"


@pytest.mark.parametrize("name", NAMES)
def test_patches_quote_no_line_of_upstreams(submodule, name):
    """Short lines (`return x`, an import) can be anybody's; a longer one would be a copy."""
    sub = submodule(name)
    for path, patch in sub.patches().items():
        theirs = {line.strip() for line in sub.original(path).decode().splitlines()}
        ours = {line.strip() for line in patch.added if len(line.strip()) > 24}
        assert not ours & theirs, f"{patch.name} quotes {path}"
