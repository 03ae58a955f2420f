"""run/setup.sh --export: an edited submodule becomes patches again."""

import pytest
from setup_house import MODEL, REASON, TRAIN, insert

from run.setup.patches import FILL_IN, offences


def series(house) -> list[str]:
    return (house.patches / "series").read_text().split()


def patch_files(house) -> dict[str, str]:
    return {file.name: file.read_text() for file in house.patches.iterdir()}


def test_an_unchanged_tree_exports_to_the_same_bytes(patched_house):
    before = patch_files(patched_house)
    done = patched_house.setup("--export", "widget")
    assert done.returncode == 0, done.stderr
    assert "up to date" in done.stdout
    assert patch_files(patched_house) == before


def test_an_edit_goes_to_the_patch_that_owns_the_file(patched_house):
    house = patched_house
    before = patch_files(house)
    edited = insert(TRAIN, {5: ["added to train", "and more"], 9: ["", "elsewhere"]})
    (house.widget / "train.py").write_text(edited)
    done = house.setup("--export", "widget")
    assert done.returncode == 0, done.stderr
    after = patch_files(house)
    assert after["0001-train.patch"].startswith(REASON + "\n\ndiff --git")
    assert "\n@@ -9,0 +12,2 @@\n+\n+elsewhere\n" in after["0001-train.patch"]
    assert after["0002-model.patch"] == before["0002-model.patch"]
    assert offences(house.patches) == []
    assert "patched, 2 of 2" in house.setup("--status").stdout
    house.setup("--reverse")
    house.setup()
    assert (house.widget / "train.py").read_text() == edited


def test_function_text_is_stripped_from_hunk_headers(patched_house):
    """git puts the enclosing function's first line, upstream's code, behind the second @@."""
    house = patched_house
    (house.widget / "train.py").write_text(insert(TRAIN, {15: ["late"]}))
    assert house.setup("--export", "widget").returncode == 0
    assert "of train" not in (house.patches / "0001-train.patch").read_text()


def test_a_file_without_a_patch_gets_one_to_be_explained(house):
    (house.patches / "series").write_text("0001-train.patch\n")
    (house.patches / "0002-model.patch").unlink()
    house.setup()
    (house.widget / "lib" / "model.py").write_text(insert(MODEL, {3: ["new"]}))
    done = house.setup("--export", "widget")
    assert done.returncode == 0, done.stderr
    assert series(house) == ["0001-train.patch", "0002-lib-model.py.patch"]
    assert "now write the reason" in done.stdout
    assert any(FILL_IN in offence for offence in offences(house.patches))


def test_a_new_file_is_exported_once_git_knows_of_it(patched_house):
    house = patched_house
    (house.widget / "extra.py").write_text("ours\n")
    done = house.setup("--export", "widget")
    assert "extra.py" in done.stdout
    assert "not exported" in done.stdout
    house.git("add", "--intent-to-add", "extra.py", cwd=house.widget)
    done = house.setup("--export", "widget")
    assert done.returncode == 0, done.stderr
    assert "new file mode 100644" in (house.patches / "0003-extra.py.patch").read_text()


def test_a_patch_with_nothing_left_is_removed(patched_house):
    house = patched_house
    house.git("checkout", "-q", "HEAD", "--", "train.py", cwd=house.widget)
    done = house.setup("--export", "widget")
    assert "removed patches/widget/0001-train.patch" in done.stdout
    assert series(house) == ["0002-model.patch"]


@pytest.mark.parametrize(
    "edited",
    [
        TRAIN.replace("line 7 of", "line seven of"),
        TRAIN.replace("line 7 of train\n", ""),
        TRAIN.removesuffix("\n"),
    ],
    ids=["changed", "removed", "no newline at the end"],
)
def test_changed_or_removed_lines_are_refused(patched_house, edited):
    house = patched_house
    (house.widget / "train.py").write_text(edited)
    before, tree = patch_files(house), house.snapshot()
    done = house.setup("--export", "widget")
    assert done.returncode == 1
    assert "changes or removes lines of upstream's" in done.stderr
    assert "Nothing was written" in done.stderr
    number = 20 if edited == TRAIN.removesuffix("\n") else 7
    assert f"line {number}: line {number} of train" in done.stderr
    assert patch_files(house) == before
    assert house.snapshot() == tree


def test_a_deleted_file_is_refused(patched_house):
    (patched_house.widget / "train.py").unlink()
    done = patched_house.setup("--export", "widget")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_changed_mode_is_refused(patched_house):
    (patched_house.widget / "train.py").chmod(0o755)
    before = patch_files(patched_house)
    done = patched_house.setup("--export", "widget")
    assert done.returncode == 1
    assert "cannot become a patch" in done.stderr
    assert patch_files(patched_house) == before


def test_an_edit_that_could_be_of_two_patches_is_refused(patched_house):
    house = patched_house
    once = insert(TRAIN, {5: ["added to train"]})
    house.write_patch("0003-again.patch", {"train.py": (once, {1: ["again"]})})
    assert house.setup().returncode == 0
    before = patch_files(house)
    assert house.setup("--export", "widget").returncode == 0
    assert patch_files(house) == before
    (house.widget / "train.py").write_text(insert(once, {1: ["again", "whose?"]}))
    done = house.setup("--export", "widget")
    assert done.returncode == 1
    assert "0001-train.patch, 0003-again.patch" in done.stderr
    assert patch_files(house) == before


def test_the_users_staging_is_left_as_it_is(patched_house):
    house = patched_house
    before = house.git("status", "--porcelain", cwd=house.widget)
    house.setup("--export", "widget")
    assert house.git("status", "--porcelain", cwd=house.widget) == before


def test_export_wants_one_name(patched_house):
    done = patched_house.setup("--export")
    assert done.returncode == 1
    assert "--export takes one submodule" in done.stderr


def test_export_without_the_submodule_says_so(house):
    done = house.setup("--export", "widget")
    assert done.returncode == 1
    assert "not here" in done.stderr
