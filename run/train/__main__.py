"""`python -m run.train PRESET`, which run/train.sh calls: trains or samples a row of Table 5."""

import argparse
import sys
from pathlib import Path

from run import backbones
from run.backbones.base import Backbone
from run.presets import Preset, get_preset

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
    backbone = backbones.get(preset.backbone)
    if args.dry_run:
        if problem := missing(args, preset, backbone):
            print(f"before this can run: {problem}", file=sys.stderr)
        return 0
    if problem := backbone.not_ready(args.third_party) or missing(args, preset, backbone):
        parser().exit(2, f"error: {problem}\n")
    return args.command.run()


def missing(args: argparse.Namespace, preset: Preset, backbone: Backbone) -> str:
    """Which weights the command reads and are not there; empty if none is."""
    for flag, file in (("--init", args.init), ("--model", args.model)):
        if file and "://" not in file and not Path(file).is_file():
            return f"{flag}: there is no file {file}"
    own = any(word.startswith("model.params.ckpt_path=") for word in args.command.native)
    if args.sample or own or "--resume_checkpoint" in args.command.flags or "-r" in args.command.flags:
        return ""
    return backbone.missing_weights(preset, args.third_party, args.init)


if __name__ == "__main__":
    sys.exit(main())
