"""Baselines as small files: from a backbone's own checkpoint to safetensors, and back.

    python -m run.tables.baselines pack   edm network-snapshot-000320.pkl edm.safetensors
    python -m run.tables.baselines unpack edm edm.safetensors model.pkl

Numbers are kept in half precision, which is enough to start a fine-tune from; run/export.sh keeps them as they are.
"""

from pathlib import Path

from safetensors.torch import save

from ogdm_core.checkpoints import read_safetensors, reading
from ogdm_core.cli import Parser, errors_in_one_line
from ogdm_core.files import atomic_write
from run import backbones
from run.provenance import ROOT


def pack(backbone: str, source: Path, target: Path, third_party: Path, half: bool = False) -> int:
    """Writes the weights of a native checkpoint as safetensors; returns how many numbers they are."""
    with reading(source):
        state, kept = backbones.get(backbone).pack(source, third_party)
    with atomic_write(target) as file:
        plain = {n: v.detach() for n, v in state.items()}
        file.write(save({n: (v.half() if half else v).contiguous() for n, v in plain.items()}, kept))
    return sum(v.numel() for v in state.values())


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
    if args.way == "pack":
        numbers = pack(args.backbone, args.source, args.target, args.third_party, half=True)
    else:
        packed, kept = read_safetensors(args.source)
        state = {n: v.float() for n, v in packed.items()}
        backbones.get(args.backbone).unpack(state, kept, args.target, args.third_party)
        numbers = sum(v.numel() for v in state.values())
    print(f"{args.target}: {numbers:,} numbers")


if __name__ == "__main__":
    main()
