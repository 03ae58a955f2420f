"""`python -m run.train PRESET`, which run/train.sh calls: trains or samples a row of Table 5."""

import sys

from run import backbones
from run.presets import get_preset

from .flags import out_of, parse, parser


def main(argv: list[str] | None = None) -> int:
    """Exit status: upstream's."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.export is not None:
        return backbones.get("ldm").export(args.export)
    preset = get_preset(args.preset)
    if args.command is None:
        print(f"{preset.name} is finished in {out_of(args, preset)}")
        return 0
    print(args.command, flush=True)
    if args.dry_run:
        return 0
    if problem := backbones.get(preset.backbone).not_ready(args.third_party):
        parser().exit(2, f"error: {problem}\n")
    return args.command.run()


if __name__ == "__main__":
    sys.exit(main())
