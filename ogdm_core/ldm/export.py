"""A model trained with latent-diffusion in the layout of upstream's released ones:

python -m ogdm_core.ldm.export logs/RUN/checkpoints/last.ckpt models/ldm/mine
"""

import sys
from pathlib import Path

import torch

from .. import trust
from ..cli import Parser, errors_in_one_line
from ..files import atomic_write

UPSTREAM_TARGET = "ldm.models.diffusion.ddpm.LatentDiffusion"


def run_configs(checkpoint: str) -> list[str]:
    """The project configs of the run that RUN/checkpoints/NAME.ckpt belongs to, oldest first."""
    run = Path(checkpoint).resolve().parents[1]
    return sorted(map(str, (run / "configs").glob("*-project.yaml")))


def without_checkpoints(config):
    """A copy of a model's config that loads no weights of its own."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    config.params.pop("ckpt_path", None)
    for stage in ("first_stage_config", "cond_stage_config"):
        node = config.params.get(stage)
        if OmegaConf.is_dict(node) and "params" in node:
            node.params.pop("ckpt_path", None)
    return config


def export(checkpoint: str, folder: str) -> None:
    """Writes DIR/model.ckpt and DIR/config.yaml, which untouched upstream code loads and samples.

    The weights are `state_dict` as it is; optimisers, D and random states stay behind.
    """
    from omegaconf import OmegaConf

    saved = trust.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    out = Path(folder)
    kept = {name: saved[name] for name in ("state_dict", "global_step", "epoch")}
    with atomic_write(out / "model.ckpt") as file:
        torch.save(kept, file)
    configs = run_configs(checkpoint)
    if not configs:
        print(f"wrote {out / 'model.ckpt'}; no run around {checkpoint}, so no config.yaml")
        return
    config = OmegaConf.merge(*map(OmegaConf.load, configs))
    config.model = without_checkpoints(config.model)
    config.model.target = UPSTREAM_TARGET
    config.model.params.pop("ogdm", None)
    OmegaConf.save(config, out / "config.yaml")
    print(f"wrote {out / 'model.ckpt'} and config.yaml, step {kept['global_step']}")


@errors_in_one_line()
def main(argv: list[str] | None = None) -> int:
    """The command line above."""
    parser = Parser(prog="python -m ogdm_core.ldm.export", description=__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", help="as in RUN/checkpoints/last.ckpt")
    parser.add_argument("folder", metavar="DIR", help="gets model.ckpt and config.yaml")
    args = parser.parse_args(argv)
    export(args.checkpoint, args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
