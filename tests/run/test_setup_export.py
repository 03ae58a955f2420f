"""run/setup.sh --export: an edited submodule becomes patches again."""

import pytest

from run.setup.patches import load
from run.setup.upstream import FILL_IN
from tests.run.setup_house import MODEL, REASON, TRAIN, insert


def patch_files(house) -> dict[str, str]:
    return {file.name: file.read_text() for file in house.patches.glob("*.patch")}


def test_an_unchanged_tree_exports_to_the_same_bytes(patched_house):
    before = patch_files(patched_house)
    assert "up to date" in patched_house.ok("--export", "widget")
    assert patch_files(patched_house) == before


def test_an_edit_goes_below_the_prose_that_is_there(patched_house):
    house = patched_house
    before = patch_files(house)
    edited = insert(TRAIN, {5: ["added to train", "and more"], 9: ["", "elsewhere"]})
    (house.widget / "train.py").write_text(edited)
    staging = house.git("status", "--porcelain", cwd=house.widget)
    house.ok("--export", "widget")
    after = patch_files(house)
    assert after["train.py.patch"].startswith(REASON + "\n\ndiff --git")
    assert "\n@@ -9,0 +12,2 @@\n+\n+elsewhere\n" in after["train.py.patch"]
    assert after["lib-model.py.patch"] == before["lib-model.py.patch"]
    assert house.git("status", "--porcelain", cwd=house.widget) == staging
    assert "patched, 2 files" in house.ok("--status")
    house.setup("--reverse")
    house.setup()
    assert (house.widget / "train.py").read_text() == edited


def test_a_file_without_a_patch_gets_one_to_be_explained(house):
    house.git("rm", "-q", "patches/widget/lib-model.py.patch")
    house.setup()
    (house.widget / "lib" / "model.py").write_text(insert(MODEL, {3: ["new"]}))
    assert "now write the reason" in house.ok("--export", "widget")
    assert [FILL_IN in patch.prose for patch in load(house.patches)] == [True, False]


def test_a_patch_with_nothing_left_is_removed(patched_house):
    house = patched_house
    house.git("checkout", "-q", "HEAD", "--", "train.py", cwd=house.widget)
    assert "removed patches/widget/train.py.patch" in house.ok("--export", "widget")
    assert set(patch_files(house)) == {"lib-model.py.patch"}


def test_an_untracked_file_is_mentioned(patched_house):
    (patched_house.widget / "extra.py").write_text("ours\n")
    said = patched_house.ok("--export", "widget")
    assert "not exported" in said and "extra.py" in said


@pytest.mark.parametrize(
    "pulled",
    [
        lambda house: house.write_patch("train.py", TRAIN, {5: ["added by a pull"]}),
        lambda house: house.write_patch("late.py", TRAIN, {5: ["added by a pull"]}),
        lambda house: house.git("rm", "-q", "patches/widget/train.py.patch"),
    ],
    ids=["changed", "new", "removed"],
)
@pytest.mark.parametrize("edit", [False, True])
def test_a_pulled_patch_is_not_overwritten(patched_house, pulled, edit):
    house = patched_house
    pulled(house)
    if edit:
        (house.widget / "train.py").write_text(insert(TRAIN, {5: ["added to train", "mine"]}))
    before, tree = patch_files(house), house.snapshot()
    said = house.refused("--export", "widget")
    assert "is not what was applied" in said and "run/setup.sh widget" in said
    assert patch_files(house) == before and house.snapshot() == tree


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda house: edit(house, TRAIN.replace("line 7 of", "line seven of")), "unexpected '@@ -7 +7 @@'"),
        (lambda house: edit(house, TRAIN.replace("line 7 of train\n", "")), "unexpected '@@ -7 +6,0 @@'"),
        (lambda house: edit(house, TRAIN.removesuffix("\n")), "unexpected '@@ -20 +20 @@'"),
        (lambda house: (house.widget / "train.py").unlink(), "no created, renamed or deleted one"),
        (lambda house: (house.widget / "train.py").chmod(0o755), "no changed mode"),
        (lambda house: new_file(house), "no created"),
        (lambda house: house.setup("--reverse"), "as upstream, not patched"),
    ],
    ids=["changed", "removed", "no newline at the end", "deleted file", "mode", "new file", "nothing"],
)
def test_what_is_no_added_line_is_refused(patched_house, change, complaint):
    house = patched_house
    before = patch_files(house)
    change(house)
    tree = house.snapshot()
    said = house.refused("--export", "widget")
    assert complaint in said and ("nothing was written" in said or "sets it up" in said)
    assert patch_files(house) == before and house.snapshot() == tree


def edit(house, text):
    (house.widget / "train.py").write_text(text)


def new_file(house):
    (house.widget / "extra.py").write_text("ours\n")
    house.git("add", "--intent-to-add", "extra.py", cwd=house.widget)


def test_export_wants_one_name(patched_house):
    assert "--export takes one submodule" in patched_house.refused("--export")


def test_export_without_the_submodule_says_so(house):
    assert "not here" in house.refused("--export", "widget")
