"""The network's flags beside its weights, in flags.json: training writes them, and what reads the weights compares.

Weights that were trained with another number of heads load without an error, and sample wrongly.
"""

import argparse
import json
import os
from typing import Any

from guided_diffusion import image_datasets
from guided_diffusion.script_util import model_and_diffusion_defaults

from ..checkpoints import differences, format_differences, reading
from ..files import write_json
from ..sealed import blobfile
from .compat import refusals

FILE = "flags.json"
# Flags that weights do not depend on, or that may change between trainings.
FREE = {"dropout", "use_fp16", "use_checkpoint", "timestep_respacing", "use_kl", "rescale_learned_sigmas"}


def of(flags: argparse.Namespace) -> dict[str, Any]:
    """The flags that the weights were made for. Those of which another one takes the place are left out."""
    named = {name: getattr(flags, name) for name in model_and_diffusion_defaults() if name not in FREE}
    if not named["channel_mult"]:
        del named["channel_mult"]  # the image size gives it
    if named["num_head_channels"] != -1:
        del named["num_heads"], named["num_heads_upsample"]
    return named


def write(folder: str, flags: argparse.Namespace) -> None:
    """Writes them into the folder of the checkpoints, with the number of classes that sampling draws from."""
    path, kept = f"{folder}/{FILE}", of(flags)
    if flags.class_cond and flags.data_dir:
        names = map(os.path.basename, image_datasets._list_image_files_recursively(flags.data_dir))
        kept["num_classes"] = len({name.split("_")[0] for name in names})
    if "://" not in path:
        return write_json(path, kept)
    with blobfile().BlobFile(path, "w") as file:
        file.write(json.dumps(kept))


@refusals()
def check(weights: str, flags: argparse.Namespace, given_as: str) -> None:
    """ValueError with the names of the flags that differ from those beside the weights; without a file all pass."""
    folder = weights.rpartition("/")[0] or "."
    path = f"{folder}/{FILE}"
    if not blobfile().exists(path):
        return
    with reading(path), blobfile().BlobFile(path, "r") as file:
        theirs = dict(json.loads(file.read()))
    if differ := differences(theirs, of(flags)):
        give = " ".join(f"--{name} {theirs[name]}" for name in differ)
        raise ValueError(
            f"{given_as}: {weights} was trained with other flags ({format_differences(differ)}); give {give}, or "
            f"remove {path} if that is wrong"
        )
