"""Reads damaged copies of a real EDM snapshot and training state; prints how many of each became what.

usage: edm_fuzz.py FOLDER COUNT      (in the folder of a patched EDM; FOLDER is for the copies)

A copy has bytes flipped, cut, repeated, or opcodes of pickle put in. Whatever reading one returns
must be data and objects of upstream's or torch's classes; otherwise one line must say what is wrong.
Python's audit events tell of any code, import, process or written file on the way.
"""

import collections
import io
import itertools
import json
import os
import pickle
import pickletools
import random
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch

from ogdm_core import checkpoints, trust
from ogdm_core.edm import compat

sys.path.insert(0, os.getcwd())
compat.install()

import dnnlib  # noqa: E402
from torch_utils import persistence  # noqa: E402
from training.augment import AugmentPipe  # noqa: E402
from training.loss import EDMLoss  # noqa: E402
from training.networks import EDMPrecond  # noqa: E402

PLAIN = (int, float, complex, str, bytes, bytearray, type(None), np.ndarray, np.generic, np.dtype,
         torch.Tensor, torch.dtype, torch.Size, torch.device, torch.storage.TypedStorage,
         torch.serialization.StorageType)  # fmt: skip
OPCODES = [bytes([code]) for code in pickle._Unpickler.dispatch]
NAMES = [b"cos\nsystem\n", b"cbuiltins\neval\n", b"cdnnlib.util\nEasyDict\n", b"ctorch.nn.modules.linear\nLinear\n",
         b"ctorch_utils.persistence\n_reconstruct_persistent_obj\n", b"ccollections\nOrderedDict\n"]  # fmt: skip
events: list[str] = []
reading = False


def audit(event: str, args: tuple) -> None:
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    kinds = ("exec", "compile", "import", "os.", "subprocess.", "pickle.find_class", "ctypes.", "socket.", "shutil.")
    if reading and (writes or event.startswith(kinds)):
        events.append(f"{event} {args!r:.200}")


def is_data(value, seen: set[int]) -> bool:
    if id(value) in seen or type(value) in PLAIN or isinstance(value, PLAIN):
        return True
    seen.add(id(value))
    if isinstance(value, dict):
        return all(is_data(part, seen) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_data(part, seen) for part in value)
    known = persistence.is_persistent(value) or type(value).__module__.startswith("torch.nn.modules.")
    return known and all(is_data(part, seen) for part in vars(value).values())


def places(program: bytes) -> list[int]:
    """Where a change may come: anywhere but in long texts and bytes, which are source code and weights."""
    starts = [at for _, _, at in pickletools.genops(program)] + [len(program)]
    return [at for a, b in itertools.pairwise(starts) if b - a < 300 for at in range(a, b)]


def mutated(content: bytes, places: list[int], rng: random.Random) -> bytes:
    """A copy with one to four changes."""
    out = bytearray(content)
    for at in sorted(rng.choices(places, k=rng.randint(1, 4)), reverse=True):
        kind = rng.randrange(5)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice(OPCODES)[0]
        elif kind == 2:
            out[at:at] = rng.choice(NAMES) + b"".join(rng.choices(OPCODES, k=rng.randint(0, 3)))
        elif kind == 3:
            del out[at : at + rng.randint(1, 8)]
        else:
            out[at:at] = out[at : at + rng.randint(1, 40)]
    return bytes(out)


def rezipped(archive: bytes, program: bytes) -> bytes:
    """The archive of torch.save with another program in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("/data.pkl") else old.read(name))
    return file.getvalue()


folder, count = Path(sys.argv[1]), int(sys.argv[2])
net = EDMPrecond(img_resolution=8, img_channels=1, model_type="SongUNet", model_channels=8,
                 channel_mult=[1], num_blocks=1)  # fmt: skip
snapshot = pickle.dumps({"ema": net, "loss_fn": EDMLoss(), "augment_pipe": AugmentPipe(p=0.1, xflip=1),
                         "dataset_kwargs": dnnlib.EasyDict(path="x")}, 2)  # fmt: skip
state = folder / "training-state-000001.pt"
torch.save({"net": net, "optimizer_state": torch.optim.Adam(net.parameters()).state_dict()}, state)
archive = state.read_bytes()
with zipfile.ZipFile(state) as opened:
    (program,) = (opened.read(name) for name in opened.namelist() if name.endswith("/data.pkl"))

where = {True: places(snapshot), False: places(program)}
for codec in ("raw_unicode_escape", "latin1", "utf-8"):  # Python imports a codec when it first meets it
    "".encode(codec)
sys.addaudithook(audit)
rng, became = random.Random(0), collections.Counter()
for i in range(-2, count):
    pickled = i % 2 == 0
    whole = snapshot if pickled else program
    damaged = whole if i < 0 else mutated(whole, where[pickled], rng)
    if not pickled:
        state.write_bytes(archive if i < 0 else rezipped(archive, damaged))
    reading = i >= 0  # the first two are whole: they may import what upstream's classes need
    try:
        read = compat.careful_pickle.load(io.BytesIO(damaged)) if pickled else torch.load(state, map_location="cpu")
        reading = False
        assert is_data(read, set()), f"{i}: {read!r:.500}"
        became["data"] += 1
    except (trust.RefusedError, checkpoints.DamagedError) as error:
        reading = False
        assert str(error) and "\n" not in str(error), f"{i}: {error}"
        became["refused" if isinstance(error, trust.RefusedError) else "damaged"] += 1
    assert not events, f"{i}: {events}"
print(json.dumps(became))
