"""run/setup.sh on a small upstream of its own: every state a submodule can be in."""

import socket
import subprocess
import time

import pytest

from run.setup import git, submodules
from tests.run.setup_house import MODEL, ROOT, TRAIN, URL, insert

TRAIN_PATCHED = insert(TRAIN, {5: ["added to train"]})
MODEL_PATCHED = insert(MODEL, {0: ["first"], 10: ["last", ""]})


def is_patched(house) -> bool:
    train, model = house.widget / "train.py", house.widget / "lib" / "model.py"
    return (train.read_text(), model.read_text()) == (TRAIN_PATCHED, MODEL_PATCHED)


def test_fetches_at_the_pin_and_patches(patched_house):
    house = patched_house
    assert is_patched(house)
    status = house.git("submodule", "status")
    assert status.startswith(f" {house.pin} third_party/widget")
    assert (house.widget / ".git").is_file()
    assert (house.root / ".git" / "modules" / "third_party" / "widget" / "HEAD").is_file()
    assert house.git("status", "--porcelain") == ""
    assert house.git("rev-list", "--all", "HEAD", cwd=house.widget).split() == [house.pin]


def test_large_files_that_nobody_reads_are_not_even_fetched(house, monkeypatch):
    """From a mirror whose owner has not allowed filters, as `git clone --mirror` leaves it."""
    code = house.root / "run" / "setup" / "submodules.py"
    code.write_text(code.read_text() + '\nSPARSE["widget"] = ("/*", "!/assets/")\n')
    house.ok()
    assert is_patched(house)
    assert not (house.widget / "assets").exists()
    assert house.git("submodule", "status").startswith(f" {house.pin}")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(house.config))
    picture = ("cat-file", "blob", f"{house.pin}:assets/picture.gif")
    with pytest.raises(git.GitError):
        git.run(*picture, cwd=house.widget)  # a check downloads nothing
    assert git.text(*picture, cwd=house.widget, network=True) == "large, and read by nobody"


def test_a_second_run_needs_no_network_and_changes_nothing(patched_house):
    house = patched_house
    before = house.snapshot()
    house.redirect(house.tmp / "nowhere")
    assert "patched, 2 files" in house.ok()
    assert house.ok("--no-env", "--quiet") == ""
    assert house.snapshot() == before


def test_reverse_gives_back_upstream(patched_house):
    house = patched_house
    house.ok("--reverse")
    assert house.git("status", "--porcelain", "--ignored", cwd=house.widget) == ""
    assert (house.widget / "train.py").read_text() == TRAIN
    house.ok("--reverse")
    house.ok()
    assert is_patched(house)


def test_reverse_keeps_a_trainers_output(patched_house):
    (patched_house.widget / "out.txt").write_text("a checkpoint")
    assert "out.txt" in patched_house.ok("--reverse")
    assert (patched_house.widget / "out.txt").read_text() == "a checkpoint"


@pytest.mark.parametrize("flags", [[], ["--reverse"], ["--check"]], ids=" ".join)
def test_an_edited_tree_is_left_alone(patched_house, flags):
    house = patched_house
    (house.widget / "train.py").write_text(TRAIN_PATCHED + "my own work\n")
    before = house.snapshot()
    said = house.refused(*flags)
    assert "    train.py" in said
    assert "--export widget" in said
    assert "lib/model.py" not in said
    assert house.snapshot() == before


def test_another_commit_is_left_alone(patched_house):
    house = patched_house
    house.setup("--reverse")
    house.git("fetch", "-q", "origin", "HEAD", cwd=house.widget)
    house.git("checkout", "-q", "FETCH_HEAD", cwd=house.widget)
    before = house.snapshot()
    said = house.refused()
    assert house.pin[:10] in said
    assert "git submodule update --checkout third_party/widget" in said
    assert house.snapshot() == before
    house.git("submodule", "update", "--checkout", "third_party/widget")
    house.ok()
    assert is_patched(house)


def test_a_moved_pin_can_be_reversed(patched_house):
    """After a pull that moves the pin, the patches at the old commit still come out."""
    house = patched_house
    moved = house.git("rev-parse", "HEAD", cwd=house.origin).strip()
    house.git("update-index", "--cacheinfo", f"160000,{moved},third_party/widget")
    house.refused()
    house.ok("--reverse")
    assert house.git("status", "--porcelain", cwd=house.widget) == ""


def test_a_half_patched_tree_is_completed(patched_house):
    house = patched_house
    (house.widget / "lib" / "model.py").write_text(MODEL)
    assert "not patched as patches/ says" in house.ok("--status")
    house.ok()
    assert is_patched(house)


def test_newer_patches_replace_older_ones(patched_house):
    house = patched_house
    house.git("rm", "-q", "patches/widget/lib-model.py.patch")
    house.write_patch("train.py", TRAIN, {1: ["another line"]})
    assert "would apply" in house.ok("--check")
    house.ok()
    assert (house.widget / "train.py").read_text() == insert(TRAIN, {1: ["another line"]})
    assert (house.widget / "lib" / "model.py").read_text() == MODEL


@pytest.mark.parametrize(
    ("path", "old", "complaint"),
    [
        ("train.py", TRAIN.replace("line 1 ", "line one "), "widget/train.py.patch is for blob"),
        ("gone.py", TRAIN, "has no file gone.py"),
    ],
)
def test_patches_that_do_not_fit_touch_nothing(house, path, old, complaint):
    house.write_patch(path, old, {2: ["x"]})
    assert complaint in house.refused()
    assert (house.widget / "train.py").read_text() == TRAIN
    assert (house.widget / "lib" / "model.py").read_text() == MODEL
    house.refused("--check")


def test_an_interrupted_fetch_goes_on(patched_house):
    house = patched_house
    house.setup("--reverse")
    git_dir = house.root / ".git" / "modules" / "third_party" / "widget"
    (git_dir / "HEAD").write_text("ref: refs/heads/main\n")  # what `git init` leaves
    (git_dir / "index.lock").touch()
    (house.widget / "train.py").unlink()
    assert "not here" in house.ok("--status")
    house.ok()
    assert is_patched(house)


def test_a_plain_submodule_update_is_accepted(house):
    house.git("submodule", "update", "--init", "third_party/widget")
    house.redirect(house.tmp / "nowhere")
    house.ok()
    assert is_patched(house)


def test_files_without_git_are_left_alone(house):
    house.widget.mkdir(parents=True)
    (house.widget / "train.py").write_text("from an archive")
    assert "no git checkout" in house.refused()
    assert house.snapshot() == {"train.py": b"from an archive"}


@pytest.mark.parametrize("place", ["/does/not/exist", "http://127.0.0.1:9/acme/widget.git"])
def test_no_network_fails_fast_and_helps(house, place):
    house.redirect(place)
    started = time.monotonic()
    said = house.refused(status=3)
    assert time.monotonic() - started < 30
    for word in ("third_party/widget", "OGDM_MIRROR", "run/quickstart.sh", "run/test.sh"):
        assert word in said


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(submodules, "PROBE_SECONDS", 1)
    git.run("init", "-q", tmp_path, cwd=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/acme/widget.git"
        started = time.monotonic()
        with pytest.raises(submodules.Unreachable, match="no answer within 1 seconds"):
            submodules.source(submodules.Submodule("widget", url, "0" * 40, tmp_path))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("place", ["acme/widget.git", "acme/widget", "widget.git", "widget"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_mirror_is_used(house, place, scheme):
    house.redirect("/does/not/exist")
    mirror = house.tmp / "cluster"
    (mirror / place).parent.mkdir(parents=True)
    house.origin.rename(mirror / place)
    house.ok(OGDM_MIRROR=f"{scheme}{mirror}/")
    assert is_patched(house)


def test_a_time_limit_ends_gits_helpers_too(tmp_path):
    started = time.monotonic()
    with pytest.raises(git.GitError, match="no answer within 0.5 seconds"):
        git.run("-c", "alias.hang=!sleep 60 & exit", "hang", cwd=tmp_path, seconds=0.5)
    assert time.monotonic() - started < 30


def test_a_mirror_with_a_work_tree_is_used(house):
    house.redirect("/does/not/exist")
    mirror = house.tmp / "cluster"
    house.git("clone", "-q", house.origin, mirror / "widget", cwd=house.tmp)
    house.ok(OGDM_MIRROR=str(mirror))
    assert is_patched(house)


def test_a_mirror_without_the_repository_says_so(house):
    assert "holds no copy of" in house.refused(OGDM_MIRROR=str(house.tmp / "empty"), status=3)


def test_a_mirror_without_the_commit_says_so(house):
    other = house.tmp / "other"
    other.mkdir()
    house.git("init", "-q", cwd=other)
    house.git("commit", "-q", "--allow-empty", "-m", "unrelated", cwd=other)
    house.redirect(other)
    assert "does not have the pinned commit" in house.refused(status=3)
    house.redirect(house.origin)
    house.ok()
    assert is_patched(house)


def test_check_changes_nothing(house):
    assert f"would fetch {house.pin[:10]}" in house.ok("--check")
    assert not house.widget.exists()
    house.setup()
    house.setup("--reverse")
    before = house.snapshot()
    assert "would apply" in house.ok("--check")
    assert house.snapshot() == before


def test_check_finds_an_unlawful_patch_without_the_submodule(house):
    house.write_patch("train.py", TRAIN, {1: ["x"]}, prose="Why.")
    assert "train.py.patch does not open with its reason" in house.refused("--check")


def test_diff_shows_reasons_and_context(patched_house):
    shown = patched_house.ok("--diff")
    assert "2 patches add 4 lines; none is changed" in shown
    assert "a silent widget cannot be tested" in shown
    assert "+added to train" in shown
    assert " line 5 of train" in shown
    assert not [line for line in shown.splitlines() if line.startswith("-") and line[:3] != "---"]


def test_diff_works_without_the_submodule(house):
    shown = house.ok("--diff")
    assert "+added to train" in shown


def test_unknown_names_are_refused(house):
    assert "no submodule 'gadget'; known: widget" in house.refused("gadget")


def test_an_archive_without_git_says_so(house):
    (house.root / ".git").rename(house.root / "gone")
    assert "not a git clone" in house.refused("--status")


def test_the_script_prints_help():
    done = subprocess.run([ROOT / "run" / "setup.sh", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for word in ("--status", "--diff", "--check", "--reverse", "--export", "OGDM_MIRROR"):
        assert word in done.stdout
    assert URL not in done.stdout
