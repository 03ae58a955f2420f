"""Faults around run/setup.sh: bad mirrors, lost patches, two at once, damaged and linked trees."""

import shutil
import subprocess
import sys
import threading
import time

import pytest

from run.lock import exclusive
from run.setup import git
from tests.run.test_setup_submodules import is_patched


def clone(house, name, *flags):
    """The upstream cloned from itself; a lazy fetch of it leads back to it."""
    place = house.tmp / name / "widget.git"
    house.git("clone", "-q", "--bare", *flags, f"file://{house.origin}", place, cwd=house.tmp)
    house.git("config", "remote.origin.url", f"file://{place}", cwd=place)
    house.redirect("/does/not/exist")
    return place.parent


def allow_filters(house):
    for key in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
        house.git("config", key, "true", cwd=house.origin)


@pytest.mark.parametrize("flags", [["--filter=blob:none"], ["--filter=blob:none", "--depth=1"]])
def test_a_partial_clone_is_no_mirror(house, flags):
    allow_filters(house)
    mirror = clone(house, "partial", *flags)
    started = time.monotonic()
    said = house.refused(OGDM_MIRROR=str(mirror), status=3)
    assert time.monotonic() - started < 60
    assert "is a partial clone" in said and "git clone --mirror" in said
    assert not house.widget.exists()


@pytest.mark.parametrize("sparse", ["", '\nSPARSE["widget"] = ("/*", "!/assets/")\n'])
def test_a_shallow_mirror_serves_its_pin_or_is_refused(house, sparse):
    """It has whole files and little history. A fetch that asks itself again would be cut here."""
    code = house.root / "run" / "setup" / "submodules.py"
    code.write_text(code.read_text() + f"{sparse}\nFETCH_SECONDS = 5\n")
    for name, flag, status in (("later", "--depth=1", 3), ("enough", "--depth=2", 0)):
        place = house.tmp / name / "widget.git"
        house.git("clone", "-q", "--bare", flag, f"file://{house.origin}", place, cwd=house.tmp)
        said = house.refused(OGDM_MIRROR=str(place.parent), status=status)
        assert ("does not have the pinned commit" in said) == bool(status)
    assert is_patched(house)


def test_a_helper_that_ignores_the_end_is_killed(tmp_path):
    deaf = "alias.deaf=!trap '' TERM; sleep 60 & wait"
    started = time.monotonic()
    with pytest.raises(git.GitError, match="no answer within"):
        git.run("-c", deaf, "deaf", cwd=tmp_path, seconds=0.3)
    assert time.monotonic() - started < 40


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


def test_the_second_one_says_who_is_at_work(tmp_path, capsys):
    file, entered = tmp_path / "lock", threading.Event()

    def second():
        with exclusive(file, "testing"):
            entered.set()

    with exclusive(file, "testing"):
        thread = threading.Thread(target=second)
        thread.start()
        said = ""
        while "is testing" not in said and thread.is_alive():
            said += capsys.readouterr().err
            time.sleep(0.01)
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set() and "waiting: process " in said


def test_a_link_to_a_moved_checkout_is_named(patched_house):
    house = patched_house
    house.widget.rename(house.tmp / "moved")
    house.widget.symlink_to(house.tmp / "moved")
    said = house.refused()
    assert "is a symbolic link to" in said and "Remove the link" in said


def test_a_damaged_record_does_not_matter_to_a_patched_tree(patched_house):
    house = patched_house
    (house.root / ".git/modules/third_party/widget/ogdm-applied.json").write_text('{"tra')
    house.ok()
    assert is_patched(house)


def test_a_place_that_cannot_be_written_is_one_line(house):
    (house.root / ".setup").write_text("a file")
    assert ".setup" in house.refused()
