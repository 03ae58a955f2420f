"""Runs the stages of rows: in order, several at a time if asked, each with a log of its own.

A stage that fails stops the rows that have it; the others go on. Ctrl-C ends the running commands
and keeps all they have written. One folder is worked on by one engine at a time.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from .stages import Command, Stage, chain

GRACE = 15  # seconds between SIGINT, SIGTERM and SIGKILL for a command that is to end


@dataclass(frozen=True)
class Outcome:
    """What became of a stage: done | failed | stopped | open."""

    status: str
    reason: str = ""
    seconds: float = 0.0
    fresh: bool = False  # done by this run


class Busy(Exception):
    """Another engine, or a command it left behind, works in this folder."""


@dataclass
class Engine:
    """`rows`: the stages of each row by its name; stages may be shared."""

    rows: dict[str, Sequence[Stage]]
    work: Path
    jobs: int = 1
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by a stage's key
    started: dict[str, float] = field(default_factory=dict)  # of the running ones
    first: dict[str, float] = field(default_factory=dict)  # share that was done before this run

    def __post_init__(self):
        self.plans = {name: chain(stages) for name, stages in self.rows.items()}
        self.stages = chain(stage for plan in self.plans.values() for stage in plan)
        self.stopping = threading.Event()
        self.lock: int | None = None
        self.rates = Rates()

    # ---- what is there --------------------------------------------------------------------------

    def outcome(self, stage: Stage) -> Outcome:
        """What is known of a stage."""
        return self.outcomes.get(stage.key, Outcome("open"))

    def failure(self, row: str) -> tuple[Stage, Outcome] | None:
        """The stage that stopped a row."""
        for stage in self.pending(row):
            if self.outcome(stage).status in ("failed", "stopped"):
                return stage, self.outcome(stage)
        return None

    def pending(self, row: str) -> list[Stage]:
        """What a row still takes, needs first; a stage that is done needs nothing any more."""
        found: dict[str, Stage] = {}

        def visit(stage: Stage) -> None:
            if self.outcome(stage).status != "done":
                for need in stage.needs:
                    visit(need)
                found.setdefault(stage.key, stage)

        needed = {need.key for stage in self.plans[row] for need in stage.needs}
        for stage in self.plans[row]:
            if stage.key not in needed:
                visit(stage)
        return list(found.values())

    def look(self) -> None:
        """Finds what earlier runs have done."""
        for stage in self.stages:
            record = stage.record()
            if record is not None:
                self.outcomes[stage.key] = Outcome("done", seconds=record["seconds"])
                self.rates.learn(stage, record["seconds"], record.get("share", 1.0))

    def open(self) -> list[Stage]:
        """Stages that are still to be done, in order, but for those whose rows have all failed."""
        live = [self.pending(row) for row in self.rows if self.failure(row) is None]
        stages = {stage.key: stage for pending in live for stage in pending}
        return [stage for stage in stages.values() if self.outcome(stage).status == "open"]

    def ready(self) -> list[Stage]:
        """Open stages that are not running and have all they need."""
        return [
            stage for stage in self.open()
            if stage.key not in self.started
            and all(self.outcome(need).status == "done" for need in stage.needs)
        ]  # fmt: skip

    def remaining(self) -> float | None:
        """Estimated seconds to the end; None as long as nothing of a needed kind has been timed."""
        total = 0.0
        for stage in self.open():
            estimate = self.rates.estimate(stage)
            if estimate is None:
                return None
            if stage.key in self.started:
                estimate = self._left(stage, estimate)
            total += estimate
        return total / self.jobs

    def _left(self, stage: Stage, estimate: float) -> float:
        """Of a running stage: from its own meter, if the log shows one, else from the estimate."""
        spent = time.monotonic() - self.started[stage.key]
        share = fraction(stage)
        done = share - self.first.get(stage.key, share)
        return spent * (1 - share) / done if done > 0 else max(estimate - spent, 0.0)

    def _follow(self, stage: Stage) -> None:
        """Notes where a stage that an earlier run had begun goes on from."""
        if stage.key not in self.first and (share := fraction(stage)):
            self.first[stage.key] = share

    # ---- running --------------------------------------------------------------------------------

    def run(self, tell=lambda event, stage: None, tick=lambda: None) -> None:
        """Does all that can be done; `tell` hears of starts and ends, `tick` comes twice a second.

        On Ctrl-C the running commands are ended, and KeyboardInterrupt goes on.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        self.lock = take_lock(self.work)
        running: dict[Future, Stage] = {}
        pool = ThreadPoolExecutor(self.jobs)
        try:
            self.look()
            while True:
                for stage in self.ready()[: self.jobs - len(running)]:
                    if not stage.log.exists():
                        self.first[stage.key] = 0.0
                    self.started[stage.key] = time.monotonic()
                    tell("start", stage)
                    running[pool.submit(self._run, stage)] = stage
                if not running:
                    return
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for stage in running.values():
                    self._follow(stage)
                for future in finished:
                    self._note(running.pop(future), future.result(), tell)
                tick()
        except KeyboardInterrupt:
            self.stopping.set()
            for future, stage in running.items():
                self._note(stage, future.result(), tell)
            raise
        finally:
            self.stopping.set()
            pool.shutdown()
            os.close(self.lock)

    def _note(self, stage: Stage, outcome: Outcome, tell) -> None:
        self.outcomes[stage.key] = outcome
        self.started.pop(stage.key)
        if outcome.status == "done":
            self.rates.learn(stage, outcome.seconds, self._share(stage))
        tell(outcome.status, stage)

    def _run(self, stage: Stage) -> Outcome:
        """Runs a stage's commands one after the other, all of their output into its log."""
        began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        stage.folder.mkdir(parents=True, exist_ok=True)
        commands: list[Command] = []
        try:
            commands = stage.build(stage.folder)
            with stage.log.open("ab", buffering=0) as log:
                for command in commands:
                    log.write(f"\n$ {command}\n".encode())
                    status = self._call(command, log)
                    if self.stopping.is_set():
                        return Outcome("stopped", "stopped by Ctrl-C")
                    if status:
                        return Outcome("failed", f"exit status {status}; see {stage.log}")
            seconds = time.monotonic() - began
            stage.finish(commands, started, seconds, self._share(stage))
        except OSError as error:
            return Outcome("failed", str(error))
        return Outcome("done", seconds=seconds, fresh=True)

    def _share(self, stage: Stage) -> float:
        """How much of a finished stage this run has done."""
        return 1 - self.first.get(stage.key, 0.0)

    def _call(self, command: Command, log) -> int:
        process = subprocess.Popen(
            command.argv, cwd=command.cwd, env=os.environ | dict(command.env), stdout=log,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            pass_fds=(self.lock,), preexec_fn=_end_with_parent(),
        )  # fmt: skip
        while True:
            try:
                return process.wait(timeout=0.3)
            except subprocess.TimeoutExpired:
                if self.stopping.is_set():
                    return _end(process)


def _end(process: subprocess.Popen) -> int:
    """Ends a command and its children: trainers that save on Ctrl-C may, then it is made to go."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.wait(timeout=GRACE)
        except ProcessLookupError:
            return process.wait()
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def _end_with_parent():
    """On Linux a command gets SIGTERM if the engine is killed; elsewhere the lock tells of it."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    return lambda: prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def take_lock(work: Path) -> int:
    """A lock on the folder, which running commands share; raises Busy if somebody has it."""
    path = work / ".lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 100).decode().strip()
        os.close(lock)
        raise Busy(
            f"{work} is in use by another run (process {holder}), or by a command that it left "
            "running; wait for it, end it, or give another --out"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


# ---- estimates ----------------------------------------------------------------------------------


class Rates:
    """Seconds a unit of work, by kind and backbone, learnt from what is done."""

    def __init__(self):
        self.seen: dict[tuple[str, str], list[float]] = {}

    def learn(self, stage: Stage, seconds: float, share: float = 1.0) -> None:
        """Takes note of a finished stage, `share` of which took `seconds`."""
        if share <= 0:
            return
        for key in ((stage.kind, stage.group), (stage.kind, "")):
            self.seen.setdefault(key, []).append(seconds / share / stage.units)

    def estimate(self, stage: Stage) -> float | None:
        """Seconds that a stage will take: as its kind did on its backbone, else on any."""
        for key in ((stage.kind, stage.group), (stage.kind, "")):
            if rates := self.seen.get(key):
                return stage.units * sum(rates) / len(rates)
        return None


def fraction(stage: Stage) -> float:
    """How far a running stage's log says it is, 0 to 1; 0 where it says nothing."""
    if stage.meter is None or not stage.log.is_file():
        return 0.0
    pattern, total = stage.meter
    with stage.log.open("rb") as file:
        file.seek(max(0, stage.log.stat().st_size - 20_000))
        text = file.read().decode(errors="replace")
    text = text.rpartition("\n$ ")[2]  # of the command that is running
    numbers = re.findall(pattern, text)
    return min(float(numbers[-1]) / total, 1.0) if numbers else 0.0


def last_line(stage: Stage, width: int = 60) -> str:
    """The end of a stage's log, for the progress line."""
    if not stage.log.is_file():
        return ""
    with stage.log.open("rb") as file:
        file.seek(max(0, stage.log.stat().st_size - 2_000))
        lines = re.split(r"[\r\n]+", file.read().decode(errors="replace").strip())
    return lines[-1].strip()[:width]


def dry_run(stages: Iterable[Stage]) -> list[str]:
    """Every command that a run would run, with a heading for each stage."""
    lines = []
    for stage in stages:
        state = " (done)" if stage.record() else ""
        lines.append(f"# {stage.name}{state}")
        lines += [str(command) for command in stage.build(stage.folder)]
    return lines
