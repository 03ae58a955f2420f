"""The command line of run/setup.sh."""

import argparse
import contextlib
import signal
import sys
from pathlib import Path

if not __package__:  # run as a folder, `python run/setup`, so that no PYTHONPATH is needed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from run.lock import exclusive  # noqa: E402
from run.provenance import ROOT  # noqa: E402
from run.setup import env, git, submodules  # noqa: E402
from run.setup.env import say  # noqa: E402
from run.setup.patches import FILL_IN, PatchError, offences  # noqa: E402
from run.setup.submodules import Refusal, Report, State, Submodule, inspect  # noqa: E402

REFUSED, UNREACHABLE = 1, 3

DESCRIPTION = """\
Makes the Python environment, fetches the upstream codebases at their pinned commits and applies
our patches to them. Safe to repeat: it does what is missing, and nothing if nothing is.

NAME is guided-diffusion (or adm), edm, latent-diffusion (or ldm); all of them by default."""

EPILOG = """\
environment variables:
  OGDM_MIRROR   directory or URL prefix with copies of the upstream repositories, as OWNER/NAME or
                NAME, with or without .git, for machines that cannot reach GitHub
  OGDM_ENV      venv (the default) or conda, which makes .conda from environment.yml
  OGDM_PYTHON   a Python to use as it is; nothing is installed

exit status: 0 all is well, 1 something is amiss and was left alone, 3 upstream is out of reach"""

OUT_OF_REACH = """\
Without them everything of our own still works: run/quickstart.sh trains and samples with
a small U-Net, run/test.sh runs all tests but those on upstream code.
On a machine that cannot reach GitHub, point at copies, made with `git clone --mirror`:
    OGDM_MIRROR=/path/to/mirrors run/setup.sh     (or a URL prefix; see --help)"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="run/setup.sh", usage="%(prog)s [option...] [NAME...]", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    what = parser.add_mutually_exclusive_group()
    for flag, text in {
        "--status": "what is here, and in which state",
        "--diff": "what our patches add to upstream, and why",
        "--check": "a dry run: say what would be done; status 1 if it would be refused",
        "--reverse": "take the patches out, so that the submodule is exactly upstream's",
        "--export": "write the edited submodule NAME back to patches/NAME",
        "--print-python": argparse.SUPPRESS,  # for run/lib.sh: NAMEs are extras here
    }.items():
        what.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--no-env", action="store_true", help="leave the environment alone")
    parser.add_argument("--quiet", action="store_true", help="speak only of changes and problems")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `run/setup.sh --diff | head` is no error
    commands = {"status": status, "diff": diff, "check": check, "reverse": reverse}
    try:
        if args.print_python:
            print(env.ensure(args.names))
            return 0
        subs = submodules.select(args.names)
        if args.status:
            print(f"{'environment':<18} {env.describe()}")
        for name, command in commands.items():
            if getattr(args, name):
                return max(map(command, subs))
        if args.export:
            if len(args.names) != 1:
                raise Refusal("--export takes one submodule, e.g. run/setup.sh --export edm")
            with _alone():
                return export(subs[0])
        return set_up(subs, args)
    except (Refusal, PatchError, git.GitError, OSError) as error:
        say(f"error: {error}")
        return REFUSED
    except KeyboardInterrupt:
        say("\ninterrupted; run the same command again to go on from here")
        return 130


def set_up(subs: list[Submodule], args: argparse.Namespace) -> int:
    """Fetches, patches, then makes the environment; goes as far as it can with each submodule."""
    refused, unreachable = [], []
    for sub in subs:
        try:
            report = _patched(sub)
            if report is None:
                with _alone():
                    report = _bring(sub)
            elif args.quiet:
                continue
            say(f"{sub.label}: {describe(report)}")
        except submodules.Unreachable as error:
            unreachable.append(f"    {sub.label}: {error}")
        except (Refusal, PatchError) as error:
            refused.append(str(error))
    for why in refused:
        say(f"\nleft alone: {why}")
    if unreachable:
        say("\nThese upstream codebases could not be fetched:", *unreachable, OUT_OF_REACH, sep="\n")
    if refused or unreachable:
        return REFUSED if refused else UNREACHABLE
    if not args.no_env:
        extras = [submodules.EXTRAS[sub.name] for sub in subs] if args.names else ["all"]
        python = env.ensure(extras)
        if not args.quiet:
            say(f"Python: {python}")
    return 0


def _patched(sub: Submodule) -> Report | None:
    """The report of a submodule that needs nothing: then nothing is written, not even a lock."""
    with contextlib.suppress(git.GitError):  # such as while another process checks it out
        report = inspect(sub)
        if report.state is State.PATCHED:
            return report
    return None


def _alone() -> contextlib.AbstractContextManager:
    return exclusive(ROOT / ".setup" / "upstream.lock", "setting up third_party")


def _bring(sub: Submodule) -> Report:
    """Fetches and patches a submodule, as far as another process has not."""
    if inspect(sub).state is State.MISSING:
        address, options = submodules.source(sub)
        say(f"Fetching {sub.label} at {sub.pin[:10]} from {address}")
        submodules.fetch(sub, address, options)
    report = inspect(sub)
    if report.problem:
        raise Refusal(report.problem)
    return report if report.state is State.PATCHED else submodules.apply(sub)


def describe(report: Report) -> str:
    """One line on a submodule."""
    words = report.state.value
    if report.state is State.PATCHED:
        count = len(report.changed)
        words = f"patched, {count} {'file' if count == 1 else 'files'}" if count else "no patches"
    return words + (f", commit {report.head[:10]}" if report.head else "")


def _mention_untracked(report: Report, remark: str = "left as they are") -> None:
    """Files that upstream does not have, such as a trainer's output."""
    if report.untracked:
        more = f" and {len(report.untracked) - 3} more" if len(report.untracked) > 3 else ""
        print(f"    untracked files, {remark}: {', '.join(report.untracked[:3])}{more}")


def status(sub: Submodule) -> int:
    """Prints the state of a submodule."""
    report = inspect(sub)
    print(f"{sub.name:<18} {describe(report)}")
    if report.problem:
        print("    " + report.problem.replace("\n", "\n    "))
    _mention_untracked(report)
    return 0


def diff(sub: Submodule) -> int:
    """Prints why each patch exists and what it adds, with context where it is applied."""
    patches, report = sub.patches(), inspect(sub)
    added = sum(len(patch.added) for patch in patches.values())
    print(f"# {sub.label} at {sub.pin[:10]}: {len(patches)} patches add {added} lines; "
          "none is changed or removed\n")  # fmt: skip
    colour = "--color=always" if sys.stdout.isatty() else "--color=never"
    for path, patch in patches.items():
        print(f"## patches/{patch.name}\n\n{patch.prose}\n")
        applied = report.head == sub.pin and path in report.changed
        print(sub.git("diff", colour, "HEAD", "--", path) + "\n" if applied else patch.diff)
    if report.state is State.EDITED:
        print(f"# {report.problem}")
    return 0


def check(sub: Submodule) -> int:
    """Says what set_up would do, and whether every patch fits; changes nothing."""
    if not (problems := offences(sub.folder)):
        report = inspect(sub)
        problems += [report.problem] if report.problem else []
        for path, patch in sub.patches().items() if report.head == sub.pin else ():
            try:
                patch.apply(sub.original(path))
            except PatchError as error:
                problems.append(str(error))
    if problems:
        say(f"{sub.label}: not well\n  " + "\n".join(problems).replace("\n", "\n  "))
        return REFUSED
    todo = {State.MISSING: f"; would fetch {sub.pin[:10]} of {sub.url}",
            State.PATCHED: ""}.get(report.state, "; would apply the patches")  # fmt: skip
    print(f"{sub.label}: {describe(report)}{todo}")
    return 0


def reverse(sub: Submodule) -> int:
    """Puts a submodule back to exactly what upstream has."""
    if inspect(sub).state is State.MISSING:
        print(f"{sub.label}: not here")
        return 0
    try:
        with _alone():
            files = submodules.reverse(sub)
    except Refusal as error:
        say(f"left alone: {error}")
        return REFUSED
    print(f"{sub.label}: as upstream" + (f", {len(files)} files put back" if files else ""))
    _mention_untracked(inspect(sub))
    return 0


def export(sub: Submodule) -> int:
    """Exports one submodule and says what came of it."""
    written, removed = submodules.export(sub)
    for file in written:
        print(f"wrote   patches/{sub.name}/{file.name}")
        if FILL_IN in file.read_text():
            print(f"now write the reason at the top of patches/{sub.name}/{file.name}")
    for file in removed:
        print(f"removed patches/{sub.name}/{file.name}: nothing of it is left in the submodule")
    if not written and not removed:
        print(f"patches/{sub.name} is up to date")
    _mention_untracked(inspect(sub), "not exported; a new file belongs in our own tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
