"""run/setup.sh on a small upstream of its own: every state a submodule can be in."""

import socket
import time

import pytest

from run.setup import git, upstream
from tests.run.setup_house import MODEL, TRAIN, URL, insert

TRAIN_PATCHED = insert(TRAIN, {5: ["added to train"]})
MODEL_PATCHED = insert(MODEL, {0: ["first"], 10: ["last", ""]})


def is_patched(house) -> bool:
    train, model = house.widget / "train.py", house.widget / "lib" / "model.py"
    return (train.read_text(), model.read_text()) == (TRAIN_PATCHED, MODEL_PATCHED)


def test_fetches_at_the_pin_and_patches(patched_house):
    house = patched_house
    assert is_patched(house)
    assert house.git("submodule", "status").startswith(f" {house.pin} third_party/widget")
    assert house.git("status", "--porcelain") == ""
    assert house.git("rev-list", "--all", "HEAD", cwd=house.widget).split() == [house.pin]


def test_large_files_that_nobody_reads_are_not_even_fetched(house):
    """From a mirror whose owner has not allowed filters, as `git clone --mirror` leaves it."""
    house.sparse()
    house.ok()
    assert is_patched(house)
    assert not (house.widget / "assets").exists()
    assert house.git("submodule", "status").startswith(f" {house.pin}")
    objects = house.git("rev-list", "--objects", "--missing=print", "HEAD", cwd=house.widget).split()
    assert [name[0] for name in objects].count("?") == 1, "the picture"


def test_an_optional_one_is_fetched_by_its_name_or_all(house):
    with (house.root / ".gitmodules").open("a") as file:
        file.write("\toptional = true\n")
    house.ok()
    assert not (house.widget / "train.py").exists()
    house.ok("wid")
    assert is_patched(house)
    assert "widget: patched" in house.ok(), "what is here is kept up to date"
    house.ok("--reverse")
    house.ok("all")
    assert is_patched(house)


def test_a_second_run_needs_no_network_and_changes_nothing(patched_house):
    house = patched_house
    before = house.snapshot()
    house.redirect(house.tmp / "nowhere")
    assert "patched, 2 files" in house.ok()
    assert house.ok("--no-env", "--quiet", "wid") == ""
    assert house.snapshot() == before


def test_reverse_gives_back_upstream_and_keeps_a_trainers_output(patched_house):
    house = patched_house
    house.ok("--reverse")
    assert house.git("status", "--porcelain", "--ignored", cwd=house.widget) == ""
    assert (house.widget / "train.py").read_text() == TRAIN
    (house.widget / "out.txt").write_text("a checkpoint")
    assert "out.txt" in house.ok("--reverse")
    house.ok()
    assert is_patched(house) and (house.widget / "out.txt").read_text() == "a checkpoint"


@pytest.mark.parametrize("flags", [[], ["--reverse"], ["--check"]], ids=" ".join)
def test_an_edited_tree_is_left_alone(patched_house, flags):
    house = patched_house
    (house.widget / "train.py").write_text(TRAIN_PATCHED + "my own work\n")
    before = house.snapshot()
    said = house.refused(*flags)
    assert "    train.py" in said and "--export widget" in said and "lib/model.py" not in said
    assert house.snapshot() == before


def test_another_commit_is_left_alone(patched_house):
    house = patched_house
    house.ok("--reverse")
    house.git("fetch", "-q", "origin", "HEAD", cwd=house.widget)
    house.git("checkout", "-q", "FETCH_HEAD", cwd=house.widget)
    before = house.snapshot()
    said = house.refused()
    assert house.pin[:10] in said and "git submodule update --checkout third_party/widget" in said
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
    assert complaint in house.refused("--check")


def test_an_interrupted_fetch_goes_on(patched_house):
    house = patched_house
    house.ok("--reverse")
    (house.widget / ".git" / "HEAD").write_text("ref: refs/heads/main\n")  # what `git init` leaves
    (house.widget / ".git" / "index.lock").touch()
    (house.widget / "train.py").unlink()
    assert "not here" in house.ok("--status")
    house.ok()
    assert is_patched(house)


@pytest.mark.parametrize("cut", [False, True])
def test_a_plain_submodule_update_is_accepted(house, cut):
    house.git("submodule", "update", "--init", "third_party/widget")
    if cut:
        (house.root / ".git/modules/third_party/widget/HEAD").write_text("ref: refs/heads/none\n")
    else:
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


def test_a_server_that_never_answers_is_given_up(house, monkeypatch):
    monkeypatch.setattr(upstream, "PROBE_SECONDS", 1)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(house.config))
    with socket.create_server(("127.0.0.1", 0)) as server:
        house.redirect(f"http://127.0.0.1:{server.getsockname()[1]}/acme/widget.git")
        started = time.monotonic()
        with pytest.raises(upstream.Unreachable, match="no answer within 1 seconds"):
            upstream.fetch(upstream.discover(house.root)["widget"])
    assert time.monotonic() - started < 10


def test_a_helper_that_ignores_the_end_is_killed(tmp_path):
    started = time.monotonic()
    with pytest.raises(git.GitError, match="no answer within 0.3 seconds"):
        git.run("-c", "alias.deaf=!trap '' TERM; sleep 60 & wait", "deaf", cwd=tmp_path, seconds=0.3)
    assert time.monotonic() - started < 40


@pytest.mark.parametrize(
    ("place", "sparse"), [("acme/widget.git", True), ("acme/widget", False), ("widget.git", False), ("widget", True)]
)
def test_a_mirror_is_used(house, place, sparse):
    house.redirect("/does/not/exist")
    mirror = house.tmp / "cluster"
    (mirror / place).parent.mkdir(parents=True)
    if place.endswith(".git"):
        house.origin.rename(mirror / place)
    else:
        house.git("clone", "-q", house.origin, mirror / place, cwd=house.tmp)
    if sparse:
        house.sparse()
    house.ok(OGDM_MIRROR=f"{mirror}/")
    assert is_patched(house)
    assert house.git("config", "remote.origin.url", cwd=house.widget).strip() == URL


def test_a_mirror_without_the_repository_says_so(house):
    assert "holds no copy of" in house.refused(OGDM_MIRROR=str(house.tmp / "empty"), status=3)


def test_a_mirror_without_the_commit_says_so(house):
    """Such as a shallow clone of a later commit."""
    for name, flag, status in (("later", "--depth=1", 3), ("enough", "--depth=2", 0)):
        place = house.tmp / name / "widget.git"
        house.git("clone", "-q", "--bare", flag, f"file://{house.origin}", place, cwd=house.tmp)
        said = house.refused(OGDM_MIRROR=str(place.parent), status=status)
        assert ("does not have the pinned commit" in said) == bool(status)
    assert is_patched(house)


def test_check_changes_nothing(house):
    assert f"would fetch {house.pin[:10]}" in house.ok("--check")
    assert not house.widget.exists()
    house.ok()
    house.ok("--reverse")
    before = house.snapshot()
    assert "would apply" in house.ok("--check")
    assert house.snapshot() == before


def test_diff_shows_reasons_and_context(patched_house):
    shown = patched_house.ok("--diff")
    assert "2 patches add 4 lines; none is changed" in shown
    assert "a silent widget cannot be tested" in shown
    assert "+added to train" in shown and " line 5 of train" in shown
    assert not [line for line in shown.splitlines() if line.startswith("-") and line[:3] != "---"]


def test_names_and_diff_without_the_submodule(house):
    assert "+added to train" in house.ok("--diff", "third_party/widget/")
    assert "no submodule 'gadget'; known: widget, wid" in house.refused("gadget")


def test_an_archive_without_git_says_so(house):
    (house.root / ".git").rename(house.root / "gone")
    assert "not a git clone" in house.refused("--status")
