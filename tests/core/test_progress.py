"""Progress on a terminal and elsewhere, by a clock of the test's own."""

import io

import pytest

from ogdm_core import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def count(monkeypatch):
    """count(file, seconds) goes through 100 steps of that length; every 50th has a note."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def go(file, seconds, until=100):
        with progress.Progress("step", 100, file=file) as bar:
            for step in range(1, until + 1):
                now[0] += seconds
                noted = step % 50 == 0
                bar.update(step, f"loss {step}" if noted else None, show=noted)
        return file.getvalue()

    return go


def test_without_a_terminal_there_is_a_line_now_and_then(count):
    lines = count(io.StringIO(), seconds=4).splitlines()
    assert lines[0] == "step 3/100  0.25/s, 6 min left" and lines[-1] == "step 100/100  loss 100"
    assert "step 50/100  loss 50  0.25/s, 3 min left" in lines and 15 < len(lines) < 40


def test_a_short_loop_shows_what_is_asked_for_only(count):
    lines = count(io.StringIO(), seconds=0.001).splitlines()
    assert lines == ["step 50/100  loss 50  1e+03/s, 0 s left", "step 100/100  loss 100"]


def test_a_terminal_has_one_line_that_ends_when_the_loop_does(count):
    for until in (100, 60):
        said = count(Terminal(), seconds=1, until=until)
        assert said.count("\n") == 1 and said.endswith("\n")
        assert said.count("\r") == until and f"step {until}/100  loss" in said
