"""What setup tells its user: states, differences, and what to do without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import env, git
from .patches import Patch
from .submodules import Report, State, Submodule, explain, inspect, rehearse


def describe(report: Report) -> str:
    """One line on a submodule."""
    words = [report.state.value]
    if report.state is State.PATCHED:
        words = [f"patched, {report.total} of {report.total}" if report.total else "no patches"]
    elif report.state is State.HALF:
        words.append(f"{report.applied} of {report.total} patches")
    if report.head:
        words.append(f"commit {report.head[:10]}")
    return ", ".join(words)


def status(subs: list[Submodule]) -> int:
    """Prints the environment and every submodule with its state."""
    print(f"environment        {_environment(subs[0].root)}")
    for sub in subs:
        report = inspect(sub)
        print(f"{sub.name:<18} {describe(report)}")
        if report.state in (State.HALF, State.DIRTY, State.WRONG_COMMIT, State.FOREIGN):
            print("    " + explain(report).replace("\n", "\n    "))
        mention_untracked(report)
    return 0


def _environment(root: Path) -> str:
    given = env.given_python()
    if given:
        return f"{given} (OGDM_PYTHON, used as it is)"
    kind, folder = env.choose(root)
    held = env.read_stamp(folder).get("extras", [])
    if not (folder / "bin" / "python").exists():
        return f"not made yet; would be {folder.relative_to(root)} ({kind})"
    if env.missing([], root):
        return f"{folder.relative_to(root)} ({kind}), to be completed by the next script that runs"
    return f"{folder.relative_to(root)} ({kind}) with {', '.join(held) or 'the core only'}"


def mention_untracked(report: Report, remark: str = "left as they are") -> None:
    """Files that neither upstream nor a patch put there, such as a trainer's output."""
    if report.untracked:
        some = ", ".join(report.untracked[:3])
        more = f" and {len(report.untracked) - 3} more" if len(report.untracked) > 3 else ""
        print(f"    untracked files, {remark}: {some}{more}")


def diff(subs: list[Submodule]) -> int:
    """Prints why each patch exists and what it adds; with context where upstream is here."""
    for sub in subs:
        series = sub.patches()
        report = inspect(sub)
        added = sum(len(change.added) for patch in series for change in patch.changes)
        files = {change.path for patch in series for change in patch.changes}
        print(f"# {sub.label} at {sub.pin[:10]}: {len(series)} patches add {added} lines "
              f"to {len(files)} files; none is changed or removed\n")  # fmt: skip
        for count, patch in enumerate(series):
            print(f"## patches/{sub.name}/{patch.name}\n\n{patch.prose}\n")
            if report.head == sub.pin:
                _diff_with_context(sub, series, count)
            else:
                print("".join(change.text for change in patch.changes))
        if report.state is State.DIRTY:
            print(f"# {explain(report)}")
    return 0


def _diff_with_context(sub: Submodule, series: list[Patch], count: int) -> None:
    """What patch number `count` adds, between the files before it and after it."""
    colour = "--color=always" if sys.stdout.isatty() else "--color=never"
    with rehearse(sub, series[:count]) as before, rehearse(sub, series[: count + 1]) as after:
        for change in series[count].changes:
            old = before / change.path
            if change.creates:
                old = Path(os.devnull)
            elif not old.exists():
                old.parent.mkdir(parents=True, exist_ok=True)
                old.write_bytes(sub.blob(change.path))
            shown = subprocess.run(
                ["git", "diff", "--no-index", "--no-ext-diff", colour, "--", old, change.path],
                cwd=after, capture_output=True, text=True,
                env=git.environment() | {"GIT_CEILING_DIRECTORIES": str(after.parent)},
            ).stdout  # fmt: skip
            print(shown.replace(str(before), ""))


def out_of_reach(reasons: dict[str, str]) -> str:
    """What to say when submodules cannot be fetched: which, why, what works, what to do."""
    lines = ["These upstream codebases could not be fetched:"]
    for name, why in reasons.items():
        lines.append(f"    third_party/{name}: {why}")
    lines += [
        "Without them everything of our own still works: run/quickstart.sh trains and samples with",
        "the embedded U-Net, run/test.sh runs all tests but those on upstream code.",
        "On a machine that cannot reach GitHub, point at copies, made with `git clone --mirror`:",
        "    OGDM_MIRROR=/path/to/mirrors run/setup.sh     (or a URL prefix; see --help)",
    ]
    if os.environ.get("OGDM_MIRROR"):
        lines.append(f"OGDM_MIRROR is {os.environ['OGDM_MIRROR']}")
    return "\n".join(lines)
