"""The law of patches: insert-only, zero context, in the series, opening with a reason.

Reading the files needs no submodule. Where one is here, its series is also applied and reversed.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from run.setup.patches import PatchError, load_series, offences, parse
from run.setup.submodules import State, Submodule, apply, inspect, rehearse, reverse

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("guided-diffusion", "edm", "latent-diffusion")
MOST_LINES = 40  # a patch calls our code; one that is longer has logic in it

GOOD = """\
Say why this patch exists, in words enough that a stranger sees the point of it at once.

diff --git a/train.py b/train.py
index 3f5f3ee..9a1b2c3 100644
--- a/train.py
+++ b/train.py
@@ -12,0 +13,2 @@
+two added
+lines
@@ -20,0 +23 @@
+one more
"""


def read(text: str):
    return parse(text, Path("edm/0001-x.patch"))


def test_every_folder_is_for_a_submodule():
    assert {folder.name for folder in (ROOT / "patches").iterdir()} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_patches_obey_the_law(name):
    folder = ROOT / "patches" / name
    assert offences(folder) == []
    for patch in load_series(folder):
        added = sum(len(change.added) for change in patch.changes)
        assert added <= MOST_LINES, f"{patch.name} adds {added} lines; move logic to ogdm_core"


@pytest.mark.parametrize("name", NAMES)
def test_patches_call_the_core(name):
    for patch in load_series(ROOT / "patches" / name):
        lines = [line for change in patch.changes for line in change.added]
        assert any("ogdm" in line for line in lines), f"{patch.name} never mentions ogdm_core"


def test_a_good_patch_reads_well():
    patch = read(GOOD)
    (change,) = patch.changes
    assert patch.prose.startswith("Say why")
    assert (change.path, change.old, change.new) == ("train.py", "3f5f3ee", "9a1b2c3")
    assert [(hunk.after, hunk.lines) for hunk in change.hunks] == [
        (12, ("two added", "lines")),
        (20, ("one more",)),
    ]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("+two added\n", "-upstream's line\n", "expected an added line"),
        ("+two added\n", " upstream's line\n", "expected an added line"),
        ("@@ -12,0 +13,2 @@", "@@ -12,0 +13,2 @@ def main():", "nothing behind it"),
        ("@@ -12,0 +13,2 @@", "@@ -12 +13,2 @@", "expected `@@ -N,0"),
        ("@@ -12,0 +13,2 @@", "@@ -12,1 +13,2 @@", "expected `@@ -N,0"),
        ("@@ -12,0 +13,2 @@", "@@ -12,0 +13,3 @@", "expected an added line"),
        ("@@ -12,0 +13,2 @@", "@@ -12,0 +13 @@", "a line too many"),
        ("@@ -12,0 +13,2 @@", "@@ -12,0 +14,2 @@", "start at 13"),
        ("@@ -20,0 +23 @@", "@@ -20,0 +21 @@", "start at 23"),
        ("@@ -20,0 +23 @@", "@@ -11,0 +14 @@", "in the file's order"),
        ("+one more\n", "+one more\n\\ No newline at end of file\n", "a line too many"),
        ("index 3f5f3ee..9a1b2c3 100644\n", "", "expected `index OLD..NEW`"),
        ("index ", "old mode 100644\nnew mode 100755\nindex ", "expected `index OLD..NEW`"),
        ("a/train.py b/train.py", "a/train.py b/new.py", "one and the same path"),
        ("+++ b/train.py", "+++ /dev/null", "expected `+++ b/train.py`"),
        ("diff --git a/train.py b/train.py\nindex 3f5f3ee..9a1b2c3 100644\n", "", "without its"),
    ],
)
def test_a_bad_patch_is_refused(old, new, complaint):
    assert old in GOOD
    with pytest.raises(PatchError, match="edm/0001-x.patch:[0-9]+: ") as caught:
        read(GOOD.replace(old, new, 1))
    assert complaint in str(caught.value)


def test_prose_alone_is_no_patch():
    with pytest.raises(PatchError, match="changes nothing"):
        read(GOOD.split("diff --git")[0])


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"a.patch": GOOD}, "no `series` file"),
        ({"a.patch": GOOD, "series": ""}, "a.patch is not in"),
        ({"series": "a.patch\n"}, "which is not there"),
        ({"a.patch": GOOD, "series": "a.patch\na.patch\n"}, "twice"),
        ({"a.patch": GOOD, "notes.txt": "", "series": "a.patch\n"}, "notes.txt is not in"),
        ({"a.patch": GOOD.split("\n", 1)[1], "series": "a.patch\n"}, "its reason"),
        ({"a.patch": "FILL IN: " + GOOD, "series": "a.patch\n"}, "FILL IN"),
        ({"a.patch": GOOD, "b.patch": GOOD, "series": "a.patch\nb.patch\n"}, "expects blob"),
        ({"a.patch": GOOD + "-gone\n", "series": "a.patch\n"}, "a line too many"),
    ],
)
def test_a_bad_series_is_reported(tmp_path, files, complaint):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert any(complaint in offence for offence in offences(tmp_path)), offences(tmp_path)


def test_a_good_series_has_no_offence(tmp_path):
    (tmp_path / "a.patch").write_text(GOOD)
    (tmp_path / "series").write_text("# the order matters\na.patch  # the only one\n\n")
    assert offences(tmp_path) == []


# ---- with the submodules -----------------------------------------------------------------------


@pytest.fixture
def copied(submodule, tmp_path):
    """copied(name) -> the Submodule in a house of its own, so that the real one stays untouched."""

    def get(name: str) -> Submodule:
        sub = submodule(name)
        place = tmp_path / "third_party" / name
        git_dir = subprocess.run(
            ["git", "rev-parse", "--absolute-git-dir"],
            cwd=sub.path, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        shutil.copytree(git_dir, place / ".git")
        (tmp_path / "patches").symlink_to(ROOT / "patches")
        copy = Submodule(name, sub.url, sub.pin, tmp_path)
        config = ["git", "config", "--file", place / ".git" / "config"]
        subprocess.run([*config, "core.worktree", place], cwd=tmp_path, check=True)
        copy.git("checkout", "--quiet", "--force", "--detach", sub.pin)
        return copy

    return get


def status(sub: Submodule) -> str:
    return sub.git("status", "--porcelain", "--ignored", "--untracked-files=all")


@pytest.mark.parametrize("name", NAMES)
def test_a_series_applies_and_reverses_without_a_trace(copied, name):
    sub = copied(name)
    assert status(sub) == ""
    report = apply(sub)
    assert report.state is State.PATCHED
    touched = {change.path for patch in sub.patches() for change in patch.changes}
    added_removed_path = [line.split() for line in sub.git("diff", "--numstat").splitlines()]
    assert {path for _, _, path in added_removed_path} == touched
    assert {removed for _, removed, _ in added_removed_path} == {"0"}
    reverse(sub)
    assert status(sub) == ""
    assert inspect(sub).state is State.CLEAN


@pytest.mark.parametrize("name", NAMES)
def test_patched_python_compiles(submodule, name):
    sub = submodule(name)
    with rehearse(sub, sub.patches()) as stage:
        for file in stage.rglob("*.py"):
            compile(file.read_text(), file, "exec")


@pytest.mark.parametrize("name", NAMES)
def test_patches_quote_no_line_of_upstreams(submodule, name):
    """Short lines (`return x`, an import) can be anybody's; a longer one would be a copy."""
    sub = submodule(name)
    for patch in sub.patches():
        for change in patch.changes:
            if not change.creates:
                theirs = {line.strip() for line in sub.blob(change.path).decode().splitlines()}
                ours = {line.strip() for line in change.added if len(line.strip()) > 24}
                assert not ours & theirs, f"{patch.name} quotes {change.path}"
