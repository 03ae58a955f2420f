"""What NVlabs' EDM and EDM2, both built on dnnlib, share: pickles read as data, shims, a check of --data.

Upstream pickles an object together with the source code of its class, and runs that code to load it.
"""

import functools
import importlib
import inspect
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import checkpoints, trust, unpickle
from .cpu import device, run_ddp_without_device_ids
from .distributed import print_once
from .images import ImageError, check_alike

PERSISTENT = unpickle.Name("torch_utils.persistence", "_reconstruct_persistent_obj")
STATE = r"training-state-\d+\.pt"


def let_samplers_name_their_data() -> None:
    """Upstream's sampler hands its dataset to torch's, which takes none any more."""
    sampler = torch.utils.data.Sampler
    if "__init__" not in vars(sampler):
        sampler.__init__ = lambda self, data_source=None: None


def train_on_a_cpu() -> None:
    """Puts the shims in place that both trainers need without a GPU."""
    run_ddp_without_device_ids()
    # The status line resets a counter of GPU memory, which a CPU build of torch does not have.
    torch.cuda.reset_peak_memory_stats = lambda device=None: None
    # Upstream always pins memory; without a GPU torch ignores it, and warns at every start.
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")


def run_untouched(argv: list[str], program: str, install: Callable[[], None], pickles: "Pickles") -> None:
    """Runs `argv[0]`, a click script of an untouched clone, with the arguments that follow.

    program   our module that is run, for the usage
    install   puts its shims in place
    pickles   in place of `pickle` where the script reads networks
    """
    if not argv or not Path(argv[0]).is_file():
        sys.exit(f"usage: python -m {program} CLONE/SCRIPT.py [--trust] [its arguments]")
    if "--trust" in argv:
        trust.GIVEN.set(True)
    script = Path(argv[0]).resolve()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *(argument for argument in argv[1:] if argument != "--trust")]
    install()
    module = importlib.import_module(script.stem)
    command = module.main if hasattr(module, "main") else module.cmdline  # of EDM, of EDM2
    loop = importlib.import_module("training.training_loop")
    loop.pickle = pickles
    if script.stem.startswith("generate"):  # fid.py reads another network, dataset_tool.py data
        module.pickle = pickles
    for function in (loop.training_loop, command.callback, getattr(module, "generate_images", None)):
        if inspect.isfunction(function):  # devices by default are CUDA's
            values = function.__defaults__ or ()
            function.__defaults__ = tuple(device(v) if isinstance(v, torch.device) else v for v in values)
    command()


def checks_pictures(main: Callable) -> Callable:
    """`main`, upstream's click command, which with --ogdm refuses pictures on which upstream ends in AssertionError."""
    import click

    @functools.wraps(main)
    def run(**options: Any) -> Any:
        if options["ogdm"] and os.path.isdir(options["data"]):
            try:
                check_alike(Path(options["data"]))
            except ImageError as error:
                raise click.ClickException(f"--data: {error}") from error
        return main(**options)

    return run


class _Unpickler(unpickle.Unpickler):
    """Reads upstream's own objects and torch's layers as data, of which a `Pickles` makes them."""

    makers = unpickle.MAKERS | {"dnnlib.util.EasyDict": dict}

    def admits(self, name: unpickle.Name) -> bool:
        return name == PERSISTENT or name.module.startswith("torch.nn.modules.")


class Pickles:
    """In place of upstream's name `pickle`: reads its files without running code of theirs, unless --trust is given.

    homes   upstream's modules, in its package `training`, of the classes that it pickles
    """

    dump = staticmethod(pickle.dump)

    def __init__(self, *homes: str):
        self.homes = homes
        self._noted: set[str] = set()  # modules of which other source code was reported

    def load(self, file: BinaryIO) -> Any:
        """pickle.load."""
        with checkpoints.reading(getattr(file, "name", "the network pickle")), unpickle.sense():
            if trust.GIVEN.get():
                return pickle.load(file)
            return self._made(_Unpickler(file).load(), {})

    def read_training_states(self) -> None:
        """Rebinds torch.load, which refuses upstream's training states by default since 2.6.

        They hold whole networks (EDM) or dnnlib's dicts (EDM2). A file named like them, read without an explicit
        `weights_only`, is read as above; any other call is torch.load's as it was, behind the gate.
        """
        load = torch.load

        def load_training_state(f, *args, **kwargs):
            trust.refuse_archives(f)
            named = isinstance(f, (str, os.PathLike)) and os.path.basename(f)
            if not named or "weights_only" in kwargs or not re.fullmatch(STATE, named):
                return load(f, *args, **kwargs)
            with checkpoints.reading(f), unpickle.sense():
                if trust.GIVEN.get():
                    return load(f, *args, weights_only=False, **kwargs)
                inert = unpickle.pickle_module(_Unpickler)
                return self._made(load(f, *args, weights_only=False, pickle_module=inert, **kwargs), {})

        torch.load = load_training_state

    def _made(self, data: Any, made: dict[int, Any]) -> Any:
        """`data` with its objects in place; those that stand in it twice are made once, and kept in `made`."""
        if isinstance(data, unpickle.Object):
            if id(data) not in made:
                made[id(data)] = self._object(*self._class_and_state(data), made)
            return made[id(data)]
        if type(data) is dict:
            return {name: self._made(value, made) for name, value in data.items()}
        return self._plain(data)

    def _plain(self, data: Any) -> Any:
        """`data`, which may hold no object where upstream has none."""
        if isinstance(data, unpickle.Object | unpickle.Name):
            raise trust.refusal(f"{getattr(data, 'maker', data)} at that place of the file")
        if isinstance(data, dict):
            self._plain([*data.keys(), *data.values()])
        elif isinstance(data, list | tuple | set | frozenset):
            for value in data:
                self._plain(value)
        return data

    def _object(self, cls: type, state: Any, made: dict[int, Any]) -> Any:
        """An object of a class by its attributes: data, and below a module's `_modules` further modules."""
        if type(state) is not dict or not all(isinstance(name, str) for name in state):
            raise pickle.UnpicklingError(f"{cls.__name__} has no attributes by name")
        if taken := [name for name in state if hasattr(cls, name)]:
            raise trust.refusal(f"{cls.__name__} with a {taken[0]} of its own")
        made_of = dict(state)
        new: Any = object.__new__(cls)
        if not isinstance(new, torch.nn.Module):
            vars(new).update(self._plain(made_of))
            return new
        for group, kind in (("_parameters", torch.Tensor), ("_buffers", torch.Tensor), ("_modules", torch.nn.Module)):
            content = made_of.pop(group)
            members = {name: self._made(value, made) for name, value in content.items()}
            if not all(isinstance(value, kind | None) for value in members.values()):
                raise pickle.UnpicklingError(f"{group} of {cls.__name__} holds something else")
            vars(new)[group] = type(content)(members)
        torch.nn.Module.__setstate__(new, self._plain(made_of))
        return new

    def _class_and_state(self, data: unpickle.Object) -> tuple[type, Any]:
        """The class of an object, which is torch's or the checked-out code's own, and its attributes.

        Upstream stores an object together with the source code of its class, and runs that. Here the
        source is only compared: where it differs, the checked-out class of that name is used.
        """
        if data.maker != PERSISTENT:
            cls = getattr(torch.nn, data.maker.name, None)
            if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module) and cls.__module__ == data.maker.module):
                raise trust.refusal(f"{data.maker}, which the file asks for,")
            return cls, data.state
        from torch_utils import persistence

        (meta,) = data.args
        name, source = meta["class_name"], meta["module_src"]
        if (meta["type"], meta["version"]) != ("class", persistence._version):
            raise pickle.UnpicklingError(f"{name} is of another version of upstream's persistence")
        homes = {home: vars(importlib.import_module(f"training.{home}")).get(name) for home in self.homes}
        found = [(home, cls) for home, cls in homes.items() if isinstance(cls, type) and persistence.is_persistent(cls)]
        if not found:
            raise trust.refusal(f"the class {name}, which the file brings as source code,")
        ((home, cls),) = found
        if source != cls._orig_module_src and home not in self._noted:
            self._noted.add(home)
            print_once(
                f"{name} was saved with other source code than {sys.modules[f'training.{home}'].__file__}; the "
                "checked-out code is used. --trust runs the saved one."
            )
        return cls, meta["state"]
