"""`python -m run.export`, which run/export.sh calls: weights out of a native checkpoint."""

import importlib
import sys

from ogdm_core.cli import errors_in_one_line
from ogdm_core.files import atomic_write, write_json
from run import backbones
from run.tables.baselines import pack

from .card import card, scores_table, training_of
from .flags import parse
from .unet import NotTheSame, convert


def main(argv: list[str] | None = None) -> int:
    """Writes DIR; a diffusers folder only where its outputs equal upstream's."""
    args = parse(sys.argv[1:] if argv is None else argv)
    with errors_in_one_line():
        if not (backbones.get(args.backbone).home(args.third_party)).is_dir():
            raise FileNotFoundError(f"there is no {args.third_party}; run/setup.sh {args.backbone} fetches the code")
        scores = scores_table(args.scores)
        mapping = importlib.import_module(f"run.export.{args.backbone}")
        network, unet = mapping.read(args.checkpoint, args.native, args.third_party), None
        why_not = sampling = ""
        try:
            mapping.check(network)
            unet = convert(network)
        except NotTheSame as error:
            why_not = str(error)
        numbers = pack(args.backbone, args.checkpoint, args.folder / "model.safetensors", args.third_party)
        flags = {"backbone": args.backbone, "flags": network.flags, "training": training_of(args.checkpoint)}
        write_json(args.folder / "model.json", flags)
        if unet:
            sampling = mapping.save(unet, network, args.folder)
        with atomic_write(args.folder / "README.md", "w") as file:
            file.write(card(args, scores, why_not, sampling))
    print(f"{args.folder}: {numbers:,} numbers in model.safetensors, their flags in model.json, a card in README.md")
    print(f"no folder for diffusers: {why_not}" if why_not else "unet/ and scheduler/ for diffusers; outputs are equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
