"""Lets NVlabs/edm, written in 2022 for CUDA, run on today's torch and on a CPU.

`install()` puts the shims in place; each gives its one reason. With CUDA only the shims for current
Python and torch are installed. They touch code that would fail otherwise. As a program, this module runs
an *untouched* script of a clone of NVlabs/edm:

    python -m ogdm_core.edm.compat path/to/edm/generate.py --network=... --outdir=...
"""

import functools
import importlib
import os
import pickle
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import click
import torch

from .. import checkpoints, trust, unpickle
from ..config import parse_bool
from ..distributed import leave_at_exit, print_once, say_who_the_environment_awaits

CPU = torch.device("cpu")
HOMES = ("networks", "loss", "augment")  # upstream's modules of classes that are pickled
PERSISTENT = unpickle.Name("torch_utils.persistence", "_reconstruct_persistent_obj")
STATE = r"training-state-\d+\.pt"
_noted: set[str] = set()  # modules of which other source code was reported


@functools.cache
def install() -> None:
    """Puts every shim in place. Call it before upstream's first import; twice does no harm."""
    say_who_the_environment_awaits()
    _provide_distutils()
    _let_samplers_name_their_data()
    _load_training_states()
    if not torch.cuda.is_available():
        _start_gloo()
        _run_ddp_without_device_ids()
        # The status line resets a counter of GPU memory, which a CPU build of torch does not have.
        torch.cuda.reset_peak_memory_stats = lambda device=None: None
        # Upstream always pins memory; without a GPU torch ignores it, and warns at every start.
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")


def device(wanted: torch.device) -> torch.device:
    """`wanted`, or the CPU where there is no CUDA: upstream's default is always "cuda"."""
    return wanted if torch.cuda.is_available() else CPU


def agree_on_seed(seed: int | None) -> int | None:
    """Rank 0's random seed for everybody, if none is given: upstream draws it on a CUDA device."""
    if seed is not None and not 0 <= seed < 2**32:
        raise click.ClickException(f"--seed: {seed} is not allowed; give one in [0, 2^32)")
    if seed is not None or torch.cuda.is_available():
        return seed
    drawn = torch.randint(1 << 31, size=[])
    torch.distributed.broadcast(drawn, src=0)
    return int(drawn)


def _provide_distutils() -> None:
    """dnnlib takes one function from distutils, which Python 3.12 no longer has."""
    if sys.version_info < (3, 12):
        return
    util = types.ModuleType("distutils.util")
    util.strtobool = lambda text: int(parse_bool(text))
    package = types.ModuleType("distutils")
    package.util = util
    sys.modules.setdefault("distutils", package)
    sys.modules.setdefault("distutils.util", util)


def _let_samplers_name_their_data() -> None:
    """Upstream's sampler hands its dataset to torch's, which takes none any more."""
    sampler = torch.utils.data.Sampler
    if "__init__" not in vars(sampler):
        sampler.__init__ = lambda self, data_source=None: None


class _Unpickler(unpickle.Unpickler):
    """Reads upstream's own objects and torch's layers as data, of which `_made` makes them."""

    makers = unpickle.MAKERS | {"dnnlib.util.EasyDict": dict}

    def admits(self, name: unpickle.Name) -> bool:
        return name == PERSISTENT or name.module.startswith("torch.nn.modules.")


def _made(data: Any, made: dict[int, Any]) -> Any:
    """`data` with its objects in place; those that stand in it twice are made once, and kept in `made`."""
    if isinstance(data, unpickle.Object):
        if id(data) not in made:
            made[id(data)] = _object(*_class_and_state(data), made)
        return made[id(data)]
    if type(data) is dict:
        return {name: _made(value, made) for name, value in data.items()}
    return _plain(data)


def _plain(data: Any) -> Any:
    """`data`, which may hold no object where upstream has none."""
    if isinstance(data, unpickle.Object | unpickle.Name):
        raise trust.refusal(f"{getattr(data, 'maker', data)} at that place of the file")
    if isinstance(data, dict):
        _plain([*data.keys(), *data.values()])
    elif isinstance(data, list | tuple | set | frozenset):
        for value in data:
            _plain(value)
    return data


def _object(cls: type, state: Any, made: dict[int, Any]) -> Any:
    """An object of a class by its attributes: data, and below a module's `_modules` further modules."""
    if type(state) is not dict or not all(isinstance(name, str) for name in state):
        raise pickle.UnpicklingError(f"{cls.__name__} has no attributes by name")
    if taken := [name for name in state if hasattr(cls, name)]:
        raise trust.refusal(f"{cls.__name__} with a {taken[0]} of its own")
    made_of = dict(state)
    new: Any = object.__new__(cls)
    if not isinstance(new, torch.nn.Module):
        vars(new).update(_plain(made_of))
        return new
    for group, kind in (("_parameters", torch.Tensor), ("_buffers", torch.Tensor), ("_modules", torch.nn.Module)):
        content = made_of.pop(group)
        members = {name: _made(value, made) for name, value in content.items()}
        if not all(isinstance(value, kind | None) for value in members.values()):
            raise pickle.UnpicklingError(f"{group} of {cls.__name__} holds something else")
        vars(new)[group] = type(content)(members)
    torch.nn.Module.__setstate__(new, _plain(made_of))
    return new


def _class_and_state(data: unpickle.Object) -> tuple[type, Any]:
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
    homes = {home: vars(importlib.import_module(f"training.{home}")).get(name) for home in HOMES}
    found = [(home, cls) for home, cls in homes.items() if isinstance(cls, type) and persistence.is_persistent(cls)]
    if not found:
        raise trust.refusal(f"the class {name}, which the file brings as source code,")
    ((home, cls),) = found
    if source != cls._orig_module_src and home not in _noted:
        _noted.add(home)
        print_once(
            f"{name} was saved with other source code than {sys.modules[f'training.{home}'].__file__}; the "
            "checked-out code is used. --trust runs the saved one."
        )
    return cls, meta["state"]


def _load(file):
    """pickle.load, by the reader above unless --trust is given."""
    with checkpoints.reading(getattr(file, "name", "the network pickle")), unpickle.sense():
        if trust.GIVEN.get():
            return pickle.load(file)
        return _made(_Unpickler(file).load(), {})


careful_pickle = types.SimpleNamespace(load=_load, dump=pickle.dump)  # in place of upstream's


def _load_training_states() -> None:
    """`--resume` reads a whole pickled network, which torch.load refuses by default since 2.6.

    A file named like upstream's own state dumps, read without an explicit `weights_only`, is read
    by the reader above; any other call is torch.load's as it was, behind the gate.
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
            return _made(load(f, *args, weights_only=False, pickle_module=inert, **kwargs), {})

    torch.load = load_training_state


def _start_gloo() -> None:
    """Upstream starts NCCL and picks a CUDA device; a CPU uses gloo and has no device to pick."""
    from torch_utils import distributed, training_stats

    def init() -> None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        here = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        for name, value in (alone | here).items():
            os.environ.setdefault(name, value)
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
        leave_at_exit()
        several = distributed.get_world_size() > 1
        training_stats.init_multiprocessing(distributed.get_rank(), CPU if several else None)

    distributed.init = init


def _run_ddp_without_device_ids() -> None:
    """Upstream names the device of each replica; DDP takes no such names for CPU modules."""

    class CPUDistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
        """DDP that ignores `device_ids`."""

        def __init__(self, module, device_ids=None, **kwargs):
            super().__init__(module, **kwargs)

    torch.nn.parallel.DistributedDataParallel = CPUDistributedDataParallel


def main(argv: list[str]) -> None:
    """Runs `argv[0]`, a click script of an untouched clone, with the arguments that follow."""
    if not argv or not Path(argv[0]).is_file():
        sys.exit("usage: python -m ogdm_core.edm.compat path/to/edm/SCRIPT.py [--trust] [its arguments]")
    if "--trust" in argv:
        trust.GIVEN.set(True)
    script = Path(argv[0]).resolve()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *(argument for argument in argv[1:] if argument != "--trust")]
    install()
    module = importlib.import_module(script.stem)
    loop = importlib.import_module("training.training_loop")
    for function in (loop.training_loop, module.main.callback):
        values = function.__defaults__ or ()
        function.__defaults__ = tuple(device(value) if isinstance(value, torch.device) else value for value in values)
    loop.pickle = careful_pickle
    if script.stem == "generate":  # fid.py reads another network, dataset_tool.py data
        module.pickle = careful_pickle
    module.main()


if __name__ == "__main__":
    main(sys.argv[1:])
