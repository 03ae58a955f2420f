"""The command line of run/setup.sh."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

if not __package__:  # run as a folder, `python run/setup`, so that no PYTHONPATH is needed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from run.setup import env, fetch, git, show  # noqa: E402
from run.setup.env import say  # noqa: E402
from run.setup.export import export  # noqa: E402
from run.setup.patches import PatchError, offences  # noqa: E402
from run.setup.submodules import (  # noqa: E402
    EXTRAS,
    Refusal,
    Report,
    State,
    Submodule,
    Unreachable,
    apply,
    explain,
    inspect,
    rehearse,
    reverse,
    select,
)

REFUSED, UNREACHABLE = 1, 3
TO_FETCH = (State.MISSING, State.UNFINISHED)
HANDS_OFF = (State.FOREIGN, State.WRONG_COMMIT, State.HALF, State.DIRTY)

DESCRIPTION = """\
Makes the Python environment, fetches the upstream codebases at their pinned commits and applies
our patches to them. Safe to repeat: it does what is missing, and nothing if nothing is.

NAME is guided-diffusion (or adm), edm, latent-diffusion (or ldm); all of them by default."""

EPILOG = """\
environment variables:
  OGDM_MIRROR   directory or URL prefix with copies of the upstream repositories, as
                OWNER/NAME.git, NAME.git or OWNER+NAME, for machines that cannot reach GitHub
  OGDM_ENV      venv or conda; by default conda where there is one, else .venv
  OGDM_PYTHON   a Python to use as it is; nothing is installed

exit status: 0 all is well, 1 something is amiss and was left alone, 3 upstream is out of reach"""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="run/setup.sh", usage="%(prog)s [option...] [NAME...]", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    what = parser.add_mutually_exclusive_group()
    flags = {
        "--status": "what is here, and in which state",
        "--diff": "what our patches change against upstream",
        "--check": "a dry run: say what would be done; status 1 if it would be refused",
        "--reverse": "take the patches out, so that the submodule is exactly upstream's",
        "--export": "write the edited submodule NAME back to patches/NAME",
        "--print-python": argparse.SUPPRESS,  # for run/lib.sh: NAMEs are extras here
    }
    for flag, text in flags.items():
        what.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--no-env", action="store_true", help="leave the environment alone")
    parser.add_argument("--quiet", action="store_true", help="speak only of changes and problems")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = arguments(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `run/setup.sh --diff | head` is no error
    try:
        if args.print_python:
            print(env.ensure(args.names))
            return 0
        subs = select(args.names)
        if args.export and (len(subs) != 1 or not args.names):
            raise Refusal("--export takes one submodule, e.g. run/setup.sh --export edm")
        if args.status:
            return show.status(subs)
        if args.diff:
            return show.diff(subs)
        if args.check:
            return check(subs)
        if args.reverse:
            return take_out(subs)
        if args.export:
            return write_back(subs[0])
        return set_up(subs, args)
    except (Refusal, PatchError, git.GitError) as error:
        say(f"error: {error}")
        return REFUSED
    except KeyboardInterrupt:
        say("\ninterrupted; run the same command again to go on from here")
        return 130


def set_up(subs: list[Submodule], args: argparse.Namespace) -> int:
    """Fetches, patches, then makes the environment; goes as far as it can with each submodule."""
    reports = [inspect(sub) for sub in subs]
    out_of_reach = _fetch([r.submodule for r in reports if r.state in TO_FETCH])
    refused = []
    for report in reports:
        if report.state in HANDS_OFF:
            refused.append(explain(report))
        elif report.submodule.name not in out_of_reach:
            try:
                _patch(report.submodule, args.quiet)
            except (Refusal, PatchError) as error:
                refused.append(f"{report.submodule.label}: {error}")
    for why in refused:
        say(f"\nleft alone: {why}")
    if out_of_reach:
        say("\n" + show.out_of_reach(out_of_reach))
    if refused or out_of_reach:
        return REFUSED if refused else UNREACHABLE
    if not args.no_env:
        python = env.ensure([EXTRAS[sub.name] for sub in subs] if args.names else ["all"])
        if not args.quiet:
            say(f"Python: {python}")
    return 0


def _fetch(subs: list[Submodule]) -> dict[str, str]:
    """Fetches what is missing; returns the reasons for those that are out of reach."""
    reasons = {}
    if subs:
        say(f"Looking for {', '.join(sub.name for sub in subs)} ...")
        sources = fetch.probe_all(subs)
    for sub in subs:
        source = sources[sub.name]
        try:
            if isinstance(source, Unreachable):
                raise source
            say(f"Fetching {sub.label} at {sub.pin[:10]} from {source}")
            fetch.fetch(sub, source)
        except Unreachable as error:
            reasons[sub.name] = str(error)
    return reasons


def _patch(sub: Submodule, quiet: bool) -> Report:
    report = inspect(sub)
    if report.state is State.OUTDATED:
        reverse(sub)
        report = inspect(sub)
    if report.state is State.CLEAN:
        report = apply(sub)
        say(f"{sub.label}: applied {report.applied} of {report.total} patches")
    elif not quiet:
        say(f"{sub.label}: {show.describe(report)}")
    return report


def check(subs: list[Submodule]) -> int:
    """Says what set_up would do, and whether every patch fits; changes nothing."""
    bad = 0
    for sub in subs:
        problems = offences(sub.folder) if sub.folder.is_dir() else []
        report = None if problems else inspect(sub)
        if report and report.state in HANDS_OFF:
            problems.append(explain(report))
        elif report and report.state not in TO_FETCH:
            try:
                with rehearse(sub, sub.patches()):
                    pass
            except Refusal as error:
                problems.append(str(error))
        if problems:
            say(f"{sub.label}: not well\n  " + "\n".join(problems).replace("\n", "\n  "))
            bad = REFUSED
        elif report.state in TO_FETCH:
            print(f"{sub.label}: {report.state.value}; would fetch {sub.pin[:10]} of {sub.url}")
        else:
            todo = "" if report.state is State.PATCHED else "; would apply the series"
            print(f"{sub.label}: {show.describe(report)}{todo}")
    return bad


def take_out(subs: list[Submodule]) -> int:
    """Puts submodules back to exactly what upstream has."""
    status = 0
    for sub in subs:
        try:
            if inspect(sub).state is State.MISSING:
                print(f"{sub.label}: not here")
                continue
            files = reverse(sub)
            print(f"{sub.label}: as upstream" + (f", {len(files)} files put back" if files else ""))
            show.mention_untracked(inspect(sub))
        except Refusal as error:
            say(f"left alone: {error}")
            status = REFUSED
    return status


def write_back(sub: Submodule) -> int:
    """Exports one submodule and says what came of it."""
    outcome = export(sub)
    for name in outcome.written:
        print(f"wrote   patches/{sub.name}/{name}")
    for name in outcome.removed:
        print(f"removed patches/{sub.name}/{name}: nothing of it is left in the submodule")
    if not outcome.written and not outcome.removed:
        print(f"patches/{sub.name} is up to date")
    for name in outcome.unexplained:
        print(f"now write the reason at the top of patches/{sub.name}/{name}")
    show.mention_untracked(inspect(sub), "not exported; `git add --intent-to-add` those to keep")
    return 0


if __name__ == "__main__":
    sys.exit(main())
