"""Baselines as small files: from a backbone's own checkpoint to safetensors, and back.

    python -m run.tables.baselines pack   edm network-snapshot-000320.pkl edm.safetensors
    python -m run.tables.baselines unpack edm edm.safetensors model.pkl

Numbers are kept in half precision, which is enough to start a fine-tune from.
"""

from pathlib import Path

from safetensors.torch import save

from ogdm_core.checkpoints import read_safetensors, reading
from ogdm_core.cli import Parser, errors_in_one_line
from ogdm_core.files import atomic_write
from run import backbones
from run.provenance import ROOT


@errors_in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Converts one file."""
    p = Parser(prog="python -m run.tables.baselines", description=__doc__)
    p.add_argument("way", choices=("pack", "unpack"))
    p.add_argument("backbone", choices=backbones.NAMES)
    p.add_argument("source", type=Path)
    p.add_argument("target", type=Path)
    p.add_argument("--third-party", type=Path, default=ROOT / "third_party", help="the codebases")
    args = p.parse_args(argv)
    backbone = backbones.get(args.backbone)
    if args.way == "pack":
        with reading(args.source):
            state, kept = backbone.pack(args.source, args.third_party)
        with atomic_write(args.target) as file:
            file.write(save({n: v.detach().half().contiguous() for n, v in state.items()}, kept))
    else:
        packed, kept = read_safetensors(args.source)
        state = {n: v.float() for n, v in packed.items()}
        backbone.unpack(state, kept, args.target, args.third_party)
    print(f"{args.target}: {sum(v.numel() for v in state.values()):,} numbers")


if __name__ == "__main__":
    main()
