"""The network's flags beside its weights, in flags.json: training writes them, and what reads the weights takes the
flags that its command does not give from there, and refuses those that are given and differ.

Weights that were trained with another number of heads load without an error, and sample wrongly.
"""

import argparse
import json
import os
from collections.abc import Callable
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


def read(weights: str) -> tuple[str, dict[str, Any]]:
    """The path of the file beside the weights, and what it holds; {} where there is none."""
    path = f"{weights.rpartition('/')[0] or '.'}/{FILE}"
    if not weights or not blobfile().exists(path):
        return path, {}
    with reading(path), blobfile().BlobFile(path, "r") as file:
        return path, dict(json.loads(file.read()))


def adopt(parser: argparse.ArgumentParser, *weights: str, where: Callable[[Any], Any] = bool) -> None:
    """Lets a parser take the model flags that are not on its command line from the file beside the weights.

    weights   the destinations of the flags that name them; the first that is given counts
    where     says of the parsed flags whether the command is ours; upstream's own keeps upstream's defaults
    """
    parse, known = parser.parse_known_args, {*model_and_diffusion_defaults(), "num_classes"}

    def parse_with_theirs(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        names = {action.dest for action in parser._actions}
        given = parse(args, namespace)[0]
        path = next(filter(None, map(vars(given).get, weights)), "") if where(given) else ""
        try:
            theirs = read(path)[1]
        except (ValueError, OSError) as error:
            parser.error(str(error))
        # As defaults: a flag that is given wins, and `check` compares it.
        parser.set_defaults(**{name: value for name, value in theirs.items() if name in known & names})
        return parse(args, namespace)

    parser.parse_known_args = parse_with_theirs  # type: ignore[method-assign]


@refusals()
def check(weights: str, flags: argparse.Namespace, given_as: str) -> str:
    """The path of the file beside the weights, "" without one; ValueError with the names of the flags that differ."""
    path, theirs = read(weights)
    if differ := differences(theirs, of(flags)):
        give = " ".join(f"--{name} {theirs[name]}" for name in differ)
        raise ValueError(
            f"{given_as}: {weights} was trained with other flags ({format_differences(differ)}); give {give}, or "
            f"remove {path} if that is wrong"
        )
    return path if theirs else ""
