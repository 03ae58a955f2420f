"""Faults around run/setup.sh: lost patches, two at once, damaged and linked trees."""

import shutil
import subprocess
import sys

import pytest

from tests.run.test_setup_upstream import is_patched


@pytest.mark.parametrize("lost", ["train.py.patch", ""])
def test_a_lost_patch_is_an_error_until_git_knows(patched_house, lost):
    house = patched_house
    file = house.patches / lost
    file.unlink() if lost else shutil.rmtree(file)
    before = house.snapshot()
    for flags in ([], ["--check"]):
        said = house.refused(*flags)
        assert "is not there" in said and "git checkout -- patches/widget" in said
    assert house.snapshot() == before
    house.git("checkout", "--", "patches")
    assert house.setup().returncode == 0 and is_patched(house)


def test_two_setups_at_once_both_succeed(house):
    command = [sys.executable, house.root / "run" / "setup", "--no-env"]
    pair = [subprocess.Popen(command, cwd=house.tmp, env=house.env, stderr=subprocess.PIPE,
                             text=True) for _ in range(2)]  # fmt: skip
    said = [process.communicate(timeout=120)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert is_patched(house)


def test_a_link_to_a_checkout_is_followed_and_named_where_it_leads_nowhere(patched_house):
    house = patched_house
    house.widget.rename(house.tmp / "moved")
    house.widget.symlink_to(house.tmp / "moved")
    house.ok()
    (house.tmp / "moved").rename(house.tmp / "moved again")
    said = house.refused()
    assert "is a symbolic link to" in said and "Remove the link" in said


def test_a_damaged_record_does_not_matter_to_a_patched_tree(patched_house):
    house = patched_house
    (house.widget / ".git/ogdm-applied.json").write_text('{"tra')
    house.ok()
    assert is_patched(house)


def test_a_place_that_cannot_be_written_is_one_line(house):
    (house.root / ".setup").write_text("a file")
    assert ".setup" in house.refused()
