"""The command line of run/setup.sh."""

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a folder, `python run/setup`, so that no PYTHONPATH is needed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ogdm_core.lock import exclusive  # noqa: E402
from run.provenance import ROOT  # noqa: E402
from run.setup import Refusal, env, fork, git, say, upstream  # noqa: E402
from run.setup.fork import export  # noqa: E402
from run.setup.patches import PatchError  # noqa: E402
from run.setup.upstream import State, Submodule, Unreachable, inspect, reverse  # noqa: E402

REFUSED, UNREACHABLE = 1, 3

DESCRIPTION = """\
Makes the Python environment, fetches the upstream codebases at their pinned commits and applies
our patches to them. Safe to repeat: it does what is missing, and nothing if nothing is.

NAME is guided-diffusion (or adm), edm, latent-diffusion (or ldm), the paper's three, which are the default; or
another of third_party/. `all` is each of them."""

EPILOG = """\
environment variables:
  OGDM_PYTHON   a Python to use as it is, such as conda's; nothing is installed
  OGDM_MIRROR   a folder with clones of the upstream repositories, as OWNER/NAME or NAME, with or
                without .git, made with `git clone --mirror`, for machines that cannot reach GitHub

exit status: 0 all is well, 1 something is amiss and was left alone, 3 upstream is out of reach"""

OUT_OF_REACH = """\
Without them everything of our own still works: run/quickstart.sh trains and samples with
a small U-Net, run/test.sh runs all tests but those on upstream code.
On a machine that cannot reach GitHub, point at copies, made with `git clone --mirror`:
    OGDM_MIRROR=/path/to/mirrors run/setup.sh     (see --help)"""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(
        prog="run/setup.sh", usage="%(prog)s [option...] [NAME...]", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("names", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    what = p.add_mutually_exclusive_group()
    for command, text in {
        status: "what is here, in which state, and what setup would do",
        diff: "what our patches add to upstream, and why",
        check: "as --status; exit status 1 if setup would be refused",
        reverse: "take the patches out, so that the submodule is exactly upstream's",
        export: "write the edited submodule NAME back to patches/NAME",
    }.items():
        what.add_argument(f"--{command.__name__}", dest="command", action="store_const", const=command, help=text)
    what.add_argument("--into", metavar="PATH", type=Path, help="add our lines to a clone or fork of NAME of yours; "
                      "all of them, or none")  # fmt: skip
    what.add_argument("--update", metavar="COMMIT", help="move NAME's pin to a commit, and the patches with it")
    p.add_argument("--branch", action="store_true", help="leave the files alone and make a branch `ogdm` there, one "
                   "commit per patch with its reason: of third_party/NAME, or with --into of PATH")  # fmt: skip
    # For run/lib.sh: NAMEs are extras here.
    what.add_argument("--print-python", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--no-env", action="store_true", help="leave the environment alone")
    p.add_argument("--quiet", action="store_true", help="speak only of changes and problems")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `run/setup.sh --diff | head` is no error
    try:
        if args.print_python:
            print(env.ensure(args.names))
            return 0
        subs = upstream.select(args.names)
        one = next((name for name in ("into", "update", "branch") if vars(args)[name]), "")
        one = "export" if args.command is export else one
        if one and len(args.names) != 1:
            raise Refusal(f"--{one} takes one submodule, such as edm, at the end of the line")
        if args.branch and (args.command or args.update):
            raise Refusal("--branch stands alone, or with --into PATH")
        if args.into:
            args.command = functools.partial(fork.into, root=args.into, as_branch=args.branch)
        elif args.update:
            args.command = functools.partial(fork.update, commit=args.update)
        elif args.branch:
            args.command = fork.branch_of_pin
        if args.command in (status, check):
            print(f"{'environment':<18} {env.describe()}")
        with _alone() if args.command is reverse or one else contextlib.nullcontext():
            code = _each(subs, args.command or functools.partial(set_up, quiet=args.quiet))
        if not (code or args.command or args.no_env):
            python = env.ensure([sub.extra for sub in subs] if args.names else ["all"])
            if not args.quiet:
                say(f"Python: {python}")
        return code
    except (Refusal, PatchError, git.GitError, OSError) as error:
        say(f"error: {error}")
        return REFUSED
    except KeyboardInterrupt:
        say("\ninterrupted; run the same command again to go on from here")
        return 130


def _each(subs: list[Submodule], command: Callable[[Submodule], None]) -> int:
    """Goes as far as it can with each submodule; returns the exit status."""
    refused, unreachable = [], []
    for sub in subs:
        try:
            command(sub)
        except Unreachable as error:
            unreachable.append(f"    {sub.label}: {error}")
        except (Refusal, PatchError) as error:
            refused.append(f"\nleft alone: {error}")
    if refused:
        say(*refused, sep="\n")
    if unreachable:
        say("\nThese upstream codebases could not be fetched:", *unreachable, OUT_OF_REACH, sep="\n")
    return REFUSED if refused else UNREACHABLE if unreachable else 0


def _alone() -> contextlib.AbstractContextManager:
    return exclusive(ROOT / ".setup" / "upstream.lock", "setting up third_party")


def set_up(sub: Submodule, quiet: bool) -> None:
    """Fetches and patches a submodule, unless it is patched: then nothing is written, not even a lock."""
    report = None
    with contextlib.suppress(git.GitError):  # such as while another process checks it out
        report = inspect(sub)
    if report and report.state is State.PATCHED:
        if quiet:
            return
    else:
        with _alone():
            if inspect(sub).state is State.MISSING:
                upstream.fetch(sub)
            report = upstream.apply(sub)
    say(f"{sub.label}: {report}")


def status(sub: Submodule) -> list[str]:
    """Prints the state of a submodule, and what setup would do; returns the problems."""
    report = inspect(sub)
    problems = [report.problem] if report.problem else []
    for path, patch in sub.patches().items() if report.head == sub.pin else ():
        try:
            patch.apply(sub.original(path))
        except PatchError as error:
            problems.append(str(error))
    todo = {State.MISSING: f"; would fetch {sub.pin[:10]} of {sub.url}", State.CLEAN: "; would apply the patches"}
    todo[State.OUTDATED] = todo[State.CLEAN]
    print(f"{sub.name:<18} {report}{'' if problems else todo.get(report.state, '')}")
    for problem in problems:
        print("    " + problem.replace("\n", "\n    "))
    upstream.mention_untracked(report, "left as they are")
    return problems


def check(sub: Submodule) -> None:
    """As status, and an error if there is a problem."""
    if status(sub):
        raise Refusal(f"{sub.label}; the reason stands above")


def diff(sub: Submodule) -> None:
    """Prints why each patch exists and what it adds, with context where it is applied."""
    patches, report = sub.patches(), inspect(sub)
    added = sum(len(patch.added) for patch in patches.values())
    print(f"# {sub.label} at {sub.pin[:10]}: {len(patches)} patches add {added} lines; none is changed or removed\n")
    colour = "--color=always" if sys.stdout.isatty() else "--color=never"
    for path, patch in patches.items():
        print(f"## patches/{patch.name}\n\n{patch.prose}\n")
        applied = report.head == sub.pin and path in report.changed
        print(sub.git("diff", colour, "HEAD", "--", path) + "\n" if applied else patch.diff)
    if report.state is State.EDITED:
        print(f"# {report.problem}")


if __name__ == "__main__":
    sys.exit(main())
