"""The tables' engine, on stages that are a line of shell each."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from run.tables.engine import Busy, Engine, Outcome, Rates, dry_run, fraction, take_lock
from run.tables.stages import Command, Stage, chain, fingerprint, newest


def stage(work: Path, name: str, *settings: str, needs=(), script: str = "", **more) -> Stage:
    """Notes its name in ran.txt, runs `script` in its folder, and makes out.txt."""

    def build(folder: Path) -> list[Command]:
        text = f"echo {name} >> {work.parent}/ran.txt; {script or ':'} && echo made > out.txt"
        return [Command(("sh", "-c", text), cwd=folder)]

    return Stage(name, name.split("/")[-1], work, settings, build, "out.txt", needs=needs, **more)


@pytest.fixture
def work(tmp_path):
    return tmp_path / "stages"


def ran(work: Path) -> list[str]:
    file = work.parent / "ran.txt"
    return file.read_text().split() if file.exists() else []


def small_table(work: Path, k: str = "0.1", nfe: str = "10", train_b: str = "") -> dict:
    """Two rows on the same data; b is a fine-tune of a."""
    data = stage(work, "digits/data")
    a = stage(work, "a/train", needs=(data,))
    b = stage(work, "b/train", k, needs=(data, a), script=train_b)
    rows = {}
    for name, train in (("a", a), ("b", b)):
        sample = stage(work, f"{name}/sample", nfe, needs=(train,))
        rows[name] = [train, stage(work, f"{name}/evaluate", needs=(sample, data))]
    return rows


def run(rows: dict, work: Path, jobs: int = 1) -> Engine:
    engine = Engine(rows, work, jobs)
    engine.run()
    return engine


def statuses(engine: Engine) -> dict[str, str]:
    return {stage.name: engine.outcome(stage).status for stage in engine.stages}


def test_stages_run_once_each_needs_first(work):
    engine = run(small_table(work), work)
    order = ran(work)
    assert sorted(order) == sorted(
        ["digits/data", "a/train", "b/train", "a/sample", "b/sample", "a/evaluate", "b/evaluate"]
    )
    assert order.index("digits/data") < order.index("a/train") < order.index("b/train")
    assert order.index("b/train") < order.index("b/sample") < order.index("b/evaluate")
    assert set(statuses(engine).values()) == {"done"}


def test_a_second_run_does_nothing(work):
    run(small_table(work), work)
    before = ran(work)
    engine = run(small_table(work), work)
    assert ran(work) == before
    assert not any(outcome.fresh for outcome in engine.outcomes.values())
    assert set(statuses(engine).values()) == {"done"}


def test_a_changed_setting_reruns_what_rests_on_it_and_nothing_else(work):
    run(small_table(work), work)
    before = len(ran(work))
    run(small_table(work, k="0.2"), work)
    assert ran(work)[before:] == ["b/train", "b/sample", "b/evaluate"]
    before = len(ran(work))
    run(small_table(work, k="0.2", nfe="20"), work)
    assert sorted(ran(work)[before:]) == ["a/evaluate", "a/sample", "b/evaluate", "b/sample"]


def test_changing_a_setting_back_finds_the_old_results(work):
    run(small_table(work), work)
    run(small_table(work, k="0.2"), work)
    before = ran(work)
    run(small_table(work), work)
    assert ran(work) == before


def test_a_changed_input_file_counts_and_its_place_does_not(work, tmp_path):
    first, second = tmp_path / "a.pt", tmp_path / "b.pt"
    first.write_text("weights")
    second.write_text("weights")
    key = stage(work, "a/sample", inputs=(str(first),)).key
    assert stage(work / "elsewhere", "a/sample", inputs=(str(second),)).key == key
    second.write_text("other weights")
    assert stage(work, "a/sample", inputs=(str(second),)).key != key
    assert fingerprint("https://host/model.pkl") == "https://host/model.pkl"


def test_a_long_file_is_told_by_its_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("run.tables.stages.WHOLE", 100)
    file = tmp_path / "big"
    file.write_bytes(bytes(3 << 20))
    before = fingerprint(str(file))
    file.write_bytes(bytes(3 << 20) + b"x")
    assert fingerprint(str(file)) != before


def test_a_failed_stage_stops_its_row_is_named_and_the_others_go_on(work):
    rows = small_table(work, train_b="echo went wrong; exit 3")
    engine = run(rows, work)
    found = statuses(engine)
    assert found["a/evaluate"] == "done"
    assert found["b/train"] == "failed"
    assert found["b/sample"] == found["b/evaluate"] == "open"
    stopped, outcome = engine.failure("b")
    assert stopped.name == "b/train"
    assert "exit status 3" in outcome.reason
    assert "went wrong" in Path(outcome.reason.partition("see ")[2]).read_text()
    assert engine.failure("a") is None


def test_a_failed_stage_is_tried_again_by_the_next_run(work):
    run(small_table(work, train_b="test -f ../../mended"), work)
    (work.parent / "mended").touch()
    before = len(ran(work))
    engine = run(small_table(work, train_b="test -f ../../mended"), work)
    assert ran(work)[before:] == ["b/train", "b/sample", "b/evaluate"]
    assert set(statuses(engine).values()) == {"done"}


def test_a_shared_stage_that_fails_stops_every_row_that_has_it(work):
    data = stage(work, "digits/data", script="false")
    rows = {name: [stage(work, f"{name}/train", needs=(data,))] for name in "ab"}
    engine = run(rows, work)
    assert ran(work) == ["digits/data"]
    assert engine.failure("a")[0] is engine.failure("b")[0] is data


def test_commands_that_end_well_without_a_product_have_failed(work):
    empty = Stage("a/train", "train", work, (), lambda _: [Command(("true",))], "model.pt")
    searched = Stage("b/train", "train", work, (), lambda _: [Command(("true",))], "m.pt", "ema*")
    engine = run({"a": [empty], "b": [searched]}, work)
    assert engine.failure("a")[1].status == engine.failure("b")[1].status == "failed"
    assert "model.pt" in engine.failure("a")[1].reason
    assert "ema*" in engine.failure("b")[1].reason


def test_a_command_that_does_not_exist_fails_its_row_only(work):
    missing = Stage("a/train", "train", work, (), lambda _: [Command(("no-such-program",))], "x")
    engine = run({"a": [missing], "b": [stage(work, "b/train")]}, work)
    assert "no-such-program" in engine.failure("a")[1].reason
    assert engine.failure("b") is None


def test_the_newest_match_becomes_the_product_and_scrap_goes(work):
    def build(folder: Path) -> list[Command]:
        text = "echo 1 > ema_1.pt; sleep 0.02; echo 2 > ema_2.pt; mkdir images; touch images/x"
        return [Command(("sh", "-c", text), cwd=folder)]

    train = Stage("a/train", "train", work, (), build, "model.pt", "ema_*.pt", scrap=("images",))
    run({"a": [train]}, work)
    assert train.output.read_text() == "2\n"
    assert not (train.folder / "images").exists()
    assert newest(train.folder, "ema_*.pt", whole=lambda p: "1" in p.name).name == "ema_1.pt"


def test_a_product_that_was_deleted_is_made_again(work):
    rows = small_table(work)
    run(rows, work)
    rows["a"][1].output.unlink()
    before = len(ran(work))
    run(small_table(work), work)
    assert ran(work)[before:] == ["a/evaluate"]


def test_what_only_finished_stages_need_is_not_made_again(work):
    rows = small_table(work)
    run(rows, work)
    for stage in chain(s for row in rows.values() for s in row):
        if "evaluate" not in stage.name:
            stage.output.unlink()
    before = len(ran(work))
    engine = run(small_table(work), work)
    assert ran(work)[before:] == [] and engine.open() == []
    rows["b"][1].output.unlink()
    run(small_table(work), work)
    assert ran(work)[before:] == ["digits/data", "a/train", "b/train", "b/sample", "b/evaluate"]


def test_markers_say_where_a_result_comes_from(work):
    rows = small_table(work, k="0.3")
    run(rows, work)
    record = json.loads((rows["b"][0].folder / "done.json").read_text())
    assert record["settings"] == ["0.3"]
    assert record["versions"]["torch"]
    assert "echo b/train" in record["commands"][0]
    assert record["seconds"] >= 0 and record["commit"]


def test_jobs_run_side_by_side(work):
    meet = "touch ../../{0}; for i in $(seq 100); do test -f ../../{1} && exit 0; sleep 0.05; done"
    rows = {
        "a": [stage(work, "a/train", script=f"({meet.format('a', 'b')}; false)")],
        "b": [stage(work, "b/train", script=f"({meet.format('b', 'a')}; false)")],
    }
    engine = run(rows, work, jobs=2)
    assert set(statuses(engine).values()) == {"done"}


# ---- killed, stopped ----------------------------------------------------------------------------

# Counts like a trainer, until somebody says that it is enough: keeps its place in a file, and goes
# on from there.
COUNT = (
    "echo $$ > pid; i=$(cat place 2>/dev/null || echo 0); echo from $i >> starts; "
    "while [ ! -f ../../enough ] && [ $i -lt 3000 ]; do "
    "i=$((i+1)); echo $i > part; mv part place; sleep 0.02; done"
)


def long_row(work: Path) -> dict:
    data = stage(work, "digits/data")
    train = stage(work, "a/train", needs=(data,), script=COUNT)
    return {"a": [train, stage(work, "a/sample", needs=(train,))]}


def run_apart(work: Path):
    """The engine in a process of its own, up to somewhere in the middle of the training."""
    rows = long_row(work)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(work,))
    child.start()
    place = rows["a"][0].folder / "place"
    _wait(lambda: place.exists() and place.read_text().strip() not in ("", "1", "2"))
    return rows, child


def _child(work: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Engine(long_row(work), work).run()
    except KeyboardInterrupt:
        os._exit(130)


def _wait(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_continues_where_it_was(work, number):
    rows, child = run_apart(work)
    train = rows["a"][0]
    pid = int((train.folder / "pid").read_text())
    os.kill(child.pid, number)
    child.join(30)
    assert child.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    _wait(lambda: _gone(pid), 20)  # no command outlives its engine
    assert train.record() is None
    engine = Engine(long_row(work), work)
    _wait(lambda: _free(work))
    (work.parent / "enough").touch()
    engine.run()
    assert set(statuses(engine).values()) == {"done"}
    assert ran(work) == ["digits/data", "a/train", "a/train", "a/sample"]
    first, second = (train.folder / "starts").read_text().splitlines()
    assert first == "from 0" and int(second.split()[1]) >= 2


def _free(work: Path) -> bool:
    try:
        os.close(take_lock(work))
    except Busy:
        return False
    return True


def test_two_engines_do_not_share_a_folder(work):
    work.mkdir(parents=True)
    lock = take_lock(work)
    with pytest.raises(Busy, match=f"process {os.getpid()}.*--out"):
        run(small_table(work), work)
    assert ran(work) == []
    os.close(lock)
    run(small_table(work), work)


# ---- what is shown ------------------------------------------------------------------------------


def test_a_dry_run_shows_every_command_and_runs_none(work):
    rows = small_table(work)
    lines = dry_run(chain(s for row in rows.values() for s in row))
    assert [line for line in lines if line.startswith("#")][:2] == ["# digits/data", "# a/train"]
    assert any("echo b/sample" in line and line.startswith("cd ") for line in lines)
    assert ran(work) == [] and not work.exists()
    run(rows, work)
    assert "# a/train (done)" in dry_run(rows["a"])


def test_commands_are_shown_as_a_shell_reads_them():
    command = Command(("python", "a b.py"), Path("/x y"), (("K", "1 2"),))
    assert str(command) == "cd '/x y' && K='1 2' python 'a b.py'"


def test_estimates_come_from_what_was_done(work):
    rates = Rates()
    adm = stage(work, "a/train", group="adm", units=10.0)
    edm = stage(work, "b/train", group="edm", units=5.0)
    assert rates.estimate(adm) is None
    rates.learn(adm, 20.0)
    assert rates.estimate(stage(work, "c/train", group="adm", units=3.0)) == 6.0
    assert rates.estimate(edm) == 10.0  # nothing of EDM yet: as on any backbone
    rates.learn(edm, 50.0)
    assert rates.estimate(edm) == 50.0
    engine = Engine({"a": [adm], "b": [edm]}, work)
    assert engine.remaining() is None
    engine.rates = rates
    assert engine.remaining() == 70.0
    engine.outcomes[edm.key] = Outcome("failed")
    assert engine.remaining() == 20.0


def test_a_log_tells_how_far_its_last_command_is(work):
    train = stage(work, "a/train", meter=(r"kimg ([\d.]+)", 20.0))
    assert fraction(train) == 0
    train.folder.mkdir(parents=True)
    train.log.write_text("\n$ train.py\nkimg 5.0\nkimg 10.0\n")
    assert fraction(train) == 0.5
    train.log.write_text("\n$ train.py\nkimg 10.0\n\n$ train.py --resume\nloading\n")
    assert fraction(train) == 0


def test_a_resumed_stage_is_timed_by_what_is_done_now(work):
    script = "echo kimg 15.0; while [ ! -f go ]; do sleep 0.05; done; echo kimg 20.0"
    train = stage(work, "a/train", script=script, meter=(r"kimg ([\d.]+)", 20.0), units=4.0)
    train.folder.mkdir(parents=True)
    train.log.write_text("\n$ train.py\n")
    engine = Engine({"a": [train]}, work)
    engine.run(tick=lambda: (train.folder / "go").touch() if train.key in engine.first else None)
    seconds = engine.outcome(train).seconds
    assert engine.rates.estimate(train) == pytest.approx(4 * seconds)
    again = Engine({"a": [train]}, work)
    again.look()
    assert again.rates.estimate(train) == pytest.approx(4 * seconds, abs=0.05)


def test_what_is_left_of_a_resumed_stage_counts_from_where_it_was(work):
    train = stage(work, "a/train", meter=(r"kimg ([\d.]+)", 20.0))
    train.folder.mkdir(parents=True)
    engine = Engine({"a": [train]}, work)
    engine.rates.learn(train, 500.0)
    engine.started[train.key] = time.monotonic() - 100
    train.log.write_text("\n$ train.py --resume\nkimg 10.0\n")
    engine._follow(train)
    assert engine.remaining() == pytest.approx(400, abs=5)  # by the estimate, so far
    train.log.write_text("\n$ train.py --resume\nkimg 10.0\nkimg 15.0\n")
    engine._follow(train)
    assert engine.remaining() == pytest.approx(100, abs=5)
