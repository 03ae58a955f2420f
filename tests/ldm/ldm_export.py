"""Exports a checkpoint and loads it into upstream's own class. usage: ldm_export.py CKPT DIR"""

import sys

import torch
from ldm.util import instantiate_from_config
from omegaconf import OmegaConf

from run.train.__main__ import main

checkpoint, folder = sys.argv[1:]
main(["export", checkpoint, folder])
model = instantiate_from_config(OmegaConf.load(f"{folder}/config.yaml").model)
assert type(model).__module__ == "ldm.models.diffusion.ddpm", type(model)
weights = torch.load(f"{folder}/model.ckpt", weights_only=True)["state_dict"]
model.load_state_dict(weights, strict=True)
print("upstream's class has taken the export")
