"""What `run/figures.sh` and `run/analysis_xi.sh` run."""

import importlib
import shlex
import sys
from collections.abc import Sequence

from ogdm_core.cli import errors_in_one_line

from .flags import parse

# Each module has a function named after the figure.
MODULES = {"teaser": "teaser", "grid": "teaser", "pairs": "teaser", "neighbours": "neighbours", "xi": "xi_figure"}


@errors_in_one_line()
def main(argv: Sequence[str] | None = None) -> int:
    """Draws one figure and prints what it wrote."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    script = ["run/analysis_xi.sh", *argv[1:]] if args.figure == "xi" else ["run/figures.sh", *argv]
    module = importlib.import_module(f"run.figures.{MODULES[args.figure]}")  # Fig. 4 needs no diffusers
    draw = getattr(module, args.figure)
    print(*draw(args, shlex.join(script)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
