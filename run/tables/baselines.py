"""Baselines as small files: from a backbone's own checkpoint to safetensors, and back.

    python -m run.tables.baselines pack   edm network-snapshot-000320.pkl edm.safetensors
    python -m run.tables.baselines unpack edm edm.safetensors model.pkl

adm   the EMA's state dict, ema_*.pt
edm   the network `ema` of a snapshot, network-snapshot-*.pkl, which --transfer reads; the arguments
      of its constructor are kept beside the weights
ldm   the EMA's U-Net of a checkpoint, *.ckpt, and the first stage if it has weights. Back in a
      checkpoint it is both the network and its EMA, and the EMA's count of steps starts anew.
Numbers are kept in half precision, which is enough to start a fine-tune from.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from ogdm_core.checkpoints import read_safetensors, reading
from ogdm_core.cli import Parser, errors_in_one_line
from ogdm_core.files import atomic_write
from run.provenance import ROOT
from run.train.commands import UPSTREAM

Weights = dict[str, Tensor]
CONSTRUCTOR = "constructor"  # of EDM's network: [class, arguments, keyword arguments]


def pack(backbone: str, checkpoint: Path) -> tuple[Weights, dict[str, str]]:
    """The weights that a fine-tune starts from, and what is kept beside them."""
    if backbone == "edm":
        from ogdm_core.edm.compat import careful_pickle

        with checkpoint.open("rb") as file:
            net = careful_pickle.load(file)["ema"]
        made = [type(net).__name__, list(net.init_args), dict(net.init_kwargs)]
        return net.state_dict(), {CONSTRUCTOR: json.dumps(made)}
    with reading(checkpoint):
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        state = state["state_dict"] if backbone == "ldm" else state
    if backbone == "ldm":
        ema = {f"model.{name}": name.replace(".", "") for name in _names(state, "model.")}
        state = {n: state.get(f"model_ema.{ema[n]}" if n in ema else n, state[n]) for n in state
                 if n in ema or n.startswith("first_stage_model.")}  # fmt: skip
    return state, {}


def unpack(backbone: str, state: Weights, kept: dict[str, str], checkpoint: Path) -> None:
    """Writes the backbone's own kind of checkpoint."""
    if backbone == "edm":
        from training import networks

        from ogdm_core.edm.compat import careful_pickle

        name, args, keywords = json.loads(kept[CONSTRUCTOR])
        net = getattr(networks, name)(*args, **keywords).eval().requires_grad_(False)
        net.load_state_dict(state)
        with atomic_write(checkpoint) as file:
            careful_pickle.dump({"ema": net}, file)
        return
    if backbone == "ldm":
        ema = {n: n.replace(".", "") for n in _names(state, "model.")}
        state = state | {f"model_ema.{short}": state[f"model.{n}"] for n, short in ema.items()}
    with atomic_write(checkpoint) as file:
        torch.save({"state_dict": state} if backbone == "ldm" else state, file)


def _names(state: Weights, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in state if name.startswith(prefix)]


@errors_in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Converts one file."""
    p = Parser(prog="python -m run.tables.baselines", description=__doc__)
    p.add_argument("way", choices=("pack", "unpack"))
    p.add_argument("backbone", choices=tuple(UPSTREAM))
    p.add_argument("source", type=Path)
    p.add_argument("target", type=Path)
    p.add_argument("--third-party", type=Path, default=ROOT / "third_party", help="with EDM's code")
    args = p.parse_args(argv)
    if args.backbone == "edm":
        from ogdm_core.edm import compat

        sys.path.insert(0, str(args.third_party / UPSTREAM["edm"]))
        compat.install()
    if args.way == "pack":
        state, kept = pack(args.backbone, args.source)
        packed = {n: v.detach().half().contiguous() for n, v in state.items()}
        with atomic_write(args.target) as file:
            file.write(save(packed, kept))
    else:
        packed, kept = read_safetensors(args.source)
        state = {n: v.float() for n, v in packed.items()}
        unpack(args.backbone, state, kept, args.target)
    print(f"{args.target}: {sum(v.numel() for v in state.values()):,} numbers")


if __name__ == "__main__":
    main()
