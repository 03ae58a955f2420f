"""Lets latent-diffusion (torch 1.7, Lightning 1.4, 2021-22) run on today's stack and on a CPU.

The patches call `install()` before upstream's own imports. One reason per shim, written at the
shim; what concerns Lightning is in `ldm.lightning`.
"""

import functools
import importlib
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL import Image

from .. import checkpoints, trust, unpickle, vision

# Upstream's main.py ends by asking its trainer for its rank, also where none was made: its
# NameError would hide what went wrong.
no_trainer = types.SimpleNamespace(global_rank=-1)


@functools.cache
def install() -> None:
    """Puts every shim in place. Once it has succeeded, another call changes nothing."""
    _find_ldm()
    _torchvision()
    _torch_load()
    _pillow()
    from . import lightning

    lightning.install()
    _only_known_targets()
    _samplers_on_any_device()
    _recomputation_under_autocast()
    _encoders_without_clip()


def _find_ldm() -> None:
    """Upstream expects `pip install -e .`; its README's commands start in its folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if importlib.util.find_spec("ldm") is None:
        raise ImportError(
            "latent-diffusion is not on the path: start in third_party/latent-diffusion "
            "(run/setup.sh fetches it), or add that folder to PYTHONPATH"
        )


def _torchvision() -> None:
    """Upstream needs `make_grid` and one transform; a torchvision beside a CPU torch often fails.

    A torchvision that imports is used. One that is installed and does not import also breaks
    Lightning's import (torchmetrics asks the package metadata), so it is hidden from that.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        if not isinstance(error, ModuleNotFoundError):
            _hide_distribution("torchvision")
            sys.modules["torchvision"] = None  # its import then raises ModuleNotFoundError
        import pytorch_lightning  # noqa: F401  before the stand-in: it looks for torchvision

        vision.provide_torchvision(
            utils={"make_grid": vision.make_grid}, transforms={"RandomHorizontalFlip": vision.RandomHorizontalFlip}
        )


def _hide_distribution(name: str) -> None:
    """Makes Lightning's availability check report one package as missing."""
    from lightning_utilities.core import imports

    version = imports._version

    def visible(package: str) -> str:
        if package == name:
            raise imports.PackageNotFoundError(package)
        return version(package)

    imports._version = visible


def _torch_load() -> None:
    """torch 2.6 made `weights_only` the default; Lightning 1.4's checkpoints hold classes as well.

    Where a call leaves the choice open and the strict reader refuses, the file is read again with
    everything that is not tensors, numbers and containers replaced by inert placeholders. So the
    released checkpoints load, and still no code of theirs runs.
    """
    strict = torch.load

    @functools.wraps(strict)
    def load(f, map_location=None, pickle_module=None, *, weights_only=None, **kwargs):
        trust.refuse_archives(f)
        if weights_only is not None or pickle_module is not None:
            return strict(f, map_location, pickle_module, weights_only=weights_only, **kwargs)
        start = f.tell() if hasattr(f, "tell") else None
        with checkpoints.reading(getattr(f, "name", f)):
            try:
                return strict(f, map_location, weights_only=True, **kwargs)
            except pickle.UnpicklingError:
                if start is not None:
                    f.seek(start)
                inert = unpickle.pickle_module(_Unpickler)
                return strict(f, map_location, inert, weights_only=False, **kwargs)

    torch.load = load


class _Unpickler(unpickle.Unpickler):
    """Leaves an `Object`, which does nothing, wherever a checkpoint asks for anything but data."""

    def admits(self, name: unpickle.Name) -> bool:
        return True


TARGETS = ("ldm.", "taming.", "main.", "ogdm_core.", "run.tables.stand_in.", "torch.nn.", "torch.optim.",
           "pytorch_lightning.callbacks.", "pytorch_lightning.loggers.")  # fmt: skip


def _only_known_targets() -> None:
    """Upstream calls whatever a config names as `target`, and reads configs beside checkpoints; so does taming.

    Here every `target` in a config must begin like one of the above before any of them is looked
    up, and be a class of these packages, unless --trust is given.
    """
    for name in ("ldm.util", "taming.main"):
        home = importlib.import_module(name)
        home.get_obj_from_str = _known(home.get_obj_from_str)
        home.instantiate_from_config = _checked(home.instantiate_from_config)


def _known(find: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's function from a name to what it names, for classes of TARGETS."""

    @functools.wraps(find)
    def get_obj_from_str(string: str, reload: bool = False) -> Any:
        check_targets({"target": string})
        found = find(string, reload)
        if not trust.GIVEN.get() and not (isinstance(found, type) and f"{found.__module__}.".startswith(TARGETS)):
            raise trust.refusal(f"target: {string}")
        return found

    return get_obj_from_str


def _checked(instantiate: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's function from a config to an object, for configs that `check_targets` lets pass."""

    @functools.wraps(instantiate)
    def instantiate_from_config(config: Any) -> Any:
        check_targets(config)
        return instantiate(config)

    return instantiate_from_config


def check_targets(config: Any) -> None:
    """Refuses a config with a `target` outside of TARGETS, at any depth, unless --trust is given."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        target = config.get("target")
        if isinstance(target, str) and not target.startswith(TARGETS) and not trust.GIVEN.get():
            raise trust.refusal(f"target: {target}")
        check_targets([*config.values()])
    elif isinstance(config, list | tuple):
        for value in config:
            check_targets(value)


def _pillow() -> None:
    """Pillow 10 dropped the name LINEAR, which upstream's datasets look up; it was BILINEAR."""
    if not hasattr(Image, "LINEAR"):
        Image.LINEAR = Image.Resampling.BILINEAR


def _samplers_on_any_device() -> None:
    """Upstream's samplers move their tables to "cuda"; they belong where the model is."""
    from ldm.models.diffusion.ddim import DDIMSampler
    from ldm.models.diffusion.plms import PLMSSampler

    def register_buffer(self, name, table):
        on_model = isinstance(table, torch.Tensor)
        setattr(self, name, table.to(self.model.betas.device) if on_model else table)

    DDIMSampler.register_buffer = PLMSSampler.register_buffer = register_buffer


def _recomputation_under_autocast() -> None:
    """Upstream computes attention again in the backward pass, when Lightning's autocast is over.

    Inputs kept in bf16 would meet float32 weights; so what is recomputed carries its autocast.
    """
    from ldm.modules.diffusionmodules.util import CheckpointFunction

    forward = CheckpointFunction.forward

    def carrying(ctx, run_function, length, *args):
        device = args[0].device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return forward(ctx, run_function, length, *args)
        under = torch.autocast(device, torch.get_autocast_dtype(device))
        return forward(ctx, under(run_function), length, *args)

    CheckpointFunction.forward = staticmethod(carrying)


def _encoders_without_clip() -> None:
    """Upstream's encoders import clip and kornia at the top; class labels need neither."""
    absent = {}
    for name in ("clip", "kornia"):
        try:
            importlib.import_module(name)
        except ImportError:
            advice = f"this encoder needs the package {name}; install it"
            absent[name] = sys.modules[name] = vision.Partial(name, advice)
    try:
        importlib.import_module("ldm.modules.encoders.modules")
    finally:
        for name in absent:
            del sys.modules[name]
