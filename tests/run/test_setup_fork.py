"""run/setup.sh --into, --branch and --update: our lines in a fork, in a branch of commits, on another commit."""

import shutil

import pytest

from run.setup import Refusal, fork
from run.setup.patches import load
from tests.run.setup_house import MODEL, REASON, TRAIN, House, insert

NAMES = ("guided-diffusion", "edm", "latent-diffusion", "edm2", "SiT")
MANY = "".join(f"new line {n}\n" for n in range(30))


@pytest.fixture
def ready(patched_house):
    """A patched house with the places of its hunks."""
    patched_house.ok("--export", "widget")
    return patched_house


@pytest.fixture
def clone(ready):
    """The user's own clone of the upstream, at the pinned commit."""
    place = ready.tmp / "clone"
    ready.git("clone", "-q", ready.origin, place, cwd=ready.tmp)
    ready.git("checkout", "-q", "-b", "mine", ready.pin, cwd=place)
    return place


def files(folder):
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and ".git" not in f.parts
    }


def change(house: House, clone, path: str, text: str) -> str:
    """Commits an edit in the clone and sends it upstream; returns the commit."""
    (clone / path).write_text(text)
    house.git("commit", "-q", "-am", "theirs", cwd=clone)
    house.git("push", "-q", "--force", "origin", "HEAD:refs/heads/next", cwd=clone)
    return house.git("rev-parse", "HEAD", cwd=clone).strip()


# ---- places --------------------------------------------------------------------------------------


def test_places_quote_nothing_and_are_written_by_export(ready):
    text = (ready.patches / "places").read_text()
    assert [line.split()[:2] for line in text.splitlines()] == [
        ["lib/model.py", "0"],
        ["lib/model.py", "10"],
        ["train.py", "5"],
    ]
    assert "line" not in text.replace("lib/model.py", "")
    before = text
    assert "up to date" in ready.ok("--export", "widget")
    assert (ready.patches / "places").read_text() == before


def test_hunks_without_a_recorded_place_are_listed(ready, clone):
    file, theirs = ready.patches / "places", MANY + TRAIN
    (clone / "train.py").write_text(theirs)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    assert "+added to train" in ready.refused("--into", str(clone), "widget")
    file.unlink()
    assert "--export widget` writes it" in ready.refused("--into", str(clone), "widget")
    assert (clone / "train.py").read_text() == theirs


# ---- --into --------------------------------------------------------------------------------------


def test_a_clone_at_the_pin_takes_what_the_submodule_has_and_a_second_time_nothing(ready, clone):
    assert "in 2 files" in ready.ok("--into", str(clone), "widget")
    assert files(clone) == ready.snapshot()
    assert "already" in ready.ok("--into", str(clone), "widget")
    assert files(clone) == ready.snapshot()


def test_a_shifted_file_still_takes_its_hunks(ready, clone):
    (clone / "train.py").write_text(MANY + TRAIN + MANY)
    (clone / "lib" / "model.py").write_bytes(MODEL.replace("\n", "\r\n").encode())
    ready.ok("--into", str(clone), "wid")
    assert (clone / "train.py").read_text() == MANY + insert(TRAIN, {5: ["added to train"]}) + MANY
    expected = insert(MODEL, {0: ["first"], 10: ["last", ""]}).replace("\n", "\r\n")
    assert (clone / "lib" / "model.py").read_bytes() == expected.encode()
    before = files(clone)
    assert "already" in ready.ok("--into", str(clone), "wid")
    assert files(clone) == before


@pytest.mark.parametrize("broken", ["changed", "twice", "gone"])
def test_a_place_that_is_not_found_is_listed_and_nothing_is_changed(ready, clone, broken):
    text = {"changed": TRAIN.replace("line 5 of", "line five of"), "twice": TRAIN + TRAIN}.get(broken)
    (clone / "train.py").unlink() if text is None else (clone / "train.py").write_text(text)
    before = files(clone)
    said = ready.refused("--into", str(clone), "widget")
    why = {"changed": "have changed", "twice": "2 places look like it", "gone": "no such file"}[broken]
    assert f"train.py, behind line 5 of commit {ready.pin[:10]}: " in said and why in said
    assert "\n    +added to train\n" in said and "+first" not in said
    assert files(clone) == before


def test_lines_that_were_added_by_hand_let_the_others_follow(ready, clone):
    theirs = TRAIN.replace("line 5 of", "line five of")
    (clone / "train.py").write_text(theirs)
    ready.refused("--into", str(clone), "widget")
    (clone / "train.py").write_text(insert(theirs, {7: ["added to train"]}))
    assert "in 1 files" in ready.ok("--into", str(clone), "widget")
    assert (clone / "train.py").read_text() == insert(theirs, {7: ["added to train"]})
    assert (clone / "lib" / "model.py").read_text() == insert(MODEL, {0: ["first"], 10: ["last", ""]})


# ---- --branch ------------------------------------------------------------------------------------


def test_the_patched_tree_is_a_branch_with_a_commit_per_patch(ready):
    before = ready.snapshot(), ready.git("status", "--porcelain", cwd=ready.widget)
    assert "2 commits" in ready.ok("--branch", "widget")
    log = ready.git("log", "--format=%B%x00", f"{ready.pin}..ogdm", cwd=ready.widget).split("\0")
    assert [text.strip() for text in log[:-1]] == [REASON, REASON]
    for path in ("train.py", "lib/model.py"):
        assert ready.git("show", f"ogdm:{path}", cwd=ready.widget).encode() == ready.snapshot()[path]
    assert (ready.snapshot(), ready.git("status", "--porcelain", cwd=ready.widget)) == before
    assert "has a branch ogdm already" in ready.refused("--branch", "widget")
    assert len(ready.git("worktree", "list", cwd=ready.widget).splitlines()) == 1


def test_a_fork_gets_the_branch_on_its_own_commits(ready, clone):
    change(ready, clone, "train.py", MANY + TRAIN)
    before = files(clone)
    ready.ok("--into", str(clone), "--branch", "widget")
    assert files(clone) == before
    assert ready.git("show", "ogdm:train.py", cwd=clone) == MANY + insert(TRAIN, {5: ["added to train"]})
    assert ready.git("rev-parse", "ogdm~2", cwd=clone) == ready.git("rev-parse", "mine", cwd=clone)
    (clone / "train.py").write_text(TRAIN)
    ready.git("branch", "-D", "ogdm", cwd=clone)
    assert "commit or stash" in ready.refused("--into", str(clone), "--branch", "widget")


# ---- --update ------------------------------------------------------------------------------------


def pinned(house) -> str:
    return house.git("ls-files", "--stage", "third_party/widget").split()[1]


def test_an_update_moves_the_pin_and_the_patches_with_it(ready, clone):
    commit = change(ready, clone, "train.py", MANY + TRAIN)
    assert "the pin is" in ready.ok("--update", commit, "widget")
    assert pinned(ready) == commit
    assert (ready.widget / "train.py").read_text() == MANY + insert(TRAIN, {5: ["added to train"]})
    assert [list(p.hunks) for p in load(ready.patches)] == [[0, 10], [35]]
    assert "patched, 2 files" in ready.ok("--status")
    assert ready.ok("--check", "widget")
    before = {file: file.read_bytes() for file in ready.patches.iterdir()}
    ready.ok("--update", commit, "widget")  # a second time changes nothing
    assert {file: file.read_bytes() for file in ready.patches.iterdir()} == before
    ready.ok("--into", str(clone), "widget")


def test_an_update_that_was_interrupted_goes_on(ready, clone):
    commit = change(ready, clone, "train.py", MANY + TRAIN)
    saved = shutil.copytree(ready.patches, ready.tmp / "saved")
    ready.ok("--update", commit, "widget")
    done = {file.name: file.read_bytes() for file in ready.patches.iterdir()}
    for written in ([], ["lib-model.py.patch"], ["lib-model.py.patch", "train.py.patch"]):
        for file in saved.iterdir():
            if file.name not in written:
                shutil.copy(file, ready.patches)
        ready.git("update-index", "--cacheinfo", f"160000,{ready.pin},third_party/widget")
        (ready.widget / ".git" / "ogdm-applied.json").unlink()
        if not written:
            ready.git("checkout", "-q", "--", "lib/model.py", cwd=ready.widget)
        ready.ok("--update", commit, "widget")
        assert {file.name: file.read_bytes() for file in ready.patches.iterdir()} == done and pinned(ready) == commit


def test_an_update_whose_hunk_finds_no_place_waits_for_the_user(ready, clone):
    theirs = TRAIN.replace("line 5 of", "line five of")
    commit = change(ready, clone, "train.py", theirs)
    before = {file: file.read_bytes() for file in ready.patches.iterdir()}
    for _ in range(2):
        said = ready.refused("--update", commit, "widget")
        assert "+added to train" in said and "+first" not in said
    assert pinned(ready) == ready.pin and {file: file.read_bytes() for file in ready.patches.iterdir()} == before
    (ready.widget / "train.py").write_text(insert(theirs, {6: ["added in another way"]}))
    ready.ok("--update", commit, "widget")
    assert pinned(ready) == commit and "patched, 2 files" in ready.ok("--status")


def test_an_update_leaves_edits_alone_and_wants_a_whole_name(ready, clone):
    commit = change(ready, clone, "train.py", MANY + TRAIN)
    assert "40 digits" in ready.refused("--update", commit[:10], "widget")
    (ready.widget / "train.py").write_text("edited\n")
    assert "was edited" in ready.refused("--update", commit, "widget")
    assert (ready.widget / "train.py").read_text() == "edited\n"


def test_each_of_them_takes_one_submodule(ready):
    for words in (["--into", "x"], ["--update", "0" * 40], ["--branch"]):
        assert "takes one submodule" in ready.refused(*words)
    assert "stands alone" in ready.refused("--branch", "--status", "widget")


# ---- the real upstreams --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_places_are_those_of_the_patches(submodule, name):
    sub = submodule(name)
    assert (sub.folder / "places").read_text() == fork.places(sub), f"run/setup.sh --export {name} writes them"
    rows = fork.read_places(sub)
    for path in sub.patches():
        for (file, after), (radius, digest) in rows.items():
            if file == path:
                assert fork.hashes(sub.original(path), radius).count(digest) == 1, f"{path}:{after}"


@pytest.mark.parametrize("name", NAMES)
def test_real_files_that_were_shifted_take_every_hunk(submodule, name, tmp_path):
    sub, inserted = submodule(name), b"# a fork's\n" * 30

    def shifted(patch, content):
        """With 30 lines above, or, where a hunk stands at the very top, below."""
        return content + inserted if 0 in patch.hunks else inserted + content

    for path, patch in sub.patches().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(shifted(patch, sub.original(path)))
    fork.into(sub, tmp_path)
    for path, patch in sub.patches().items():
        assert (tmp_path / path).read_bytes() == shifted(patch, patch.apply(sub.original(path)))


@pytest.mark.parametrize("name", NAMES)
def test_a_real_file_with_another_neighbourhood_is_listed(submodule, name, tmp_path):
    sub = submodule(name)
    for path in sub.patches():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(sub.original(path))
    path, patch = next(iter(sub.patches().items()))
    lines = sub.original(path).splitlines(keepends=True)
    near = max(min(patch.hunks) - 1, 0)
    lines[near] = b"# another line\n"
    (tmp_path / path).write_bytes(b"".join(lines))
    before = files(tmp_path)
    with pytest.raises(Refusal, match=f"{path}, behind line {min(patch.hunks)} of"):
        fork.into(sub, tmp_path)
    assert files(tmp_path) == before
