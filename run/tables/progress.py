"""What a user sees while stages run: a line a finished stage, and one that moves."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .engine import Engine, fraction, last_line
from .stages import Stage

MARKS = {"done": "[green]done[/]", "failed": "[red]failed[/]", "stopped": "[yellow]stopped[/]"}


def duration(seconds: float) -> str:
    """As people say it: 45 s, 12 min, 3.2 h, 5.1 days."""
    for size, unit in ((86_400, "days"), (3_600, "h")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def state(engine: Engine) -> str:
    """17 of 48 stages, about 12 min left."""
    total = len(engine.stages)
    finished = sum(engine.outcome(stage).status == "done" for stage in engine.stages)
    left = engine.remaining()
    about = "no estimate yet" if left is None else f"about {duration(left)} left"
    return f"{finished} of {total} stages, {about}"


class Watch:
    """Follows an engine on a console; without a terminal only starts and ends are printed."""

    def __init__(self, engine: Engine, console: Console):
        self.engine, self.console = engine, console
        self.live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def tell(self, event: str, stage: Stage) -> None:
        """A stage starts or ends."""
        if event == "start":
            if not self.console.is_terminal:
                self.console.print(f"start  {stage.name}  ({state(self.engine)})", highlight=False)
            return
        outcome = self.engine.outcome(stage)
        detail = duration(outcome.seconds) if event == "done" else outcome.reason
        self.console.print(f"{MARKS[event]}  {stage.name}  {detail}", highlight=False)

    def tick(self) -> None:
        """The line that moves: what runs, how far it is, what is left."""
        if not self.console.is_terminal:
            return
        lines = []
        for stage in self.engine.stages:
            if stage.key in self.engine.started:
                share = fraction(stage)
                percent = f" {share:.0%}" if share else ""
                lines.append(f"  {stage.name}{percent}  {last_line(stage)}")
        text = "\n".join([state(self.engine), *lines])
        self.live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
