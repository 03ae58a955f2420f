"""Reads good and hostile EDM pickles in the folder of a patched EDM; prints what became of each.

usage: edm_pickles.py FOLDER [--trust]      (FOLDER is for files that the hostile ones try to write)
"""

import io
import json
import os
import pickle
import sys
from pathlib import Path

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

folder = Path(sys.argv[1])
if "--trust" in sys.argv:
    trust.GIVEN.set(True)


class Call:
    """Pickles as a call that the reader is asked to make."""

    def __init__(self, function, *args):
        self.parts = function, args

    def __reduce__(self):
        return self.parts


def touch(name: str) -> tuple:
    return os.system, f"touch '{folder / name}'"


def nested(name: str) -> bytes:
    file = io.BytesIO()
    torch.save(Call(*touch(name)), file)
    return file.getvalue()


def source(name: str, class_name: str) -> dict:
    code = f"import os\nos.system({touch(name)[1]!r})\nclass {class_name}: pass\n"
    return {
        "type": "class",
        "version": 6,
        "module_src": code,
        "class_name": class_name,
        "state": {},
    }


net = EDMPrecond(img_resolution=8, img_channels=1, label_dim=10, model_type="SongUNet",
                 model_channels=8, channel_mult=[1, 2], augment_dim=9)  # fmt: skip
optimizer = torch.optim.Adam(net.parameters())
net(torch.randn(2, 1, 8, 8), torch.ones(2)).sum().backward()
optimizer.step()
rebuild = persistence._reconstruct_persistent_obj
snapshots = {
    "good": {"ema": net, "loss_fn": EDMLoss(), "augment_pipe": AugmentPipe(p=0.1, xflip=1),
             "dataset_kwargs": dnnlib.EasyDict(path="x")},
    "call": Call(*touch("call")),
    "upstream's function": Call(dnnlib.util.call_func_by_name, "x"),
    "nested": Call(torch.storage._load_from_bytes, nested("nested")),
    "other source": Call(rebuild, source("other source", "EDMLoss")),
    "other class": Call(rebuild, source("other class", "Mine")),
}  # fmt: skip
states = {
    "good state": {"net": net, "optimizer_state": optimizer.state_dict()},
    "state": {"net": Call(*touch("state"))},
}
results = {}
for name, content in (snapshots | states).items():
    try:
        if name in states:
            path = folder / "training-state-000001.pt"
            torch.save(content, path)
            read = torch.load(path, map_location="cpu")
        else:
            read = compat.careful_pickle.load(io.BytesIO(pickle.dumps(content)))
        results[name] = "read"
    except trust.RefusedError as error:
        assert "--trust" in str(error)
        results[name] = "refused"
    except (checkpoints.DamagedError, AssertionError):
        results[name] = "failed"
    if name.startswith("good"):
        back, there = read["net" if name in states else "ema"].state_dict(), net.state_dict()
        assert all(torch.equal(back[key], there[key]) for key in there)
    results[name] += " and ran code" if (folder / name).exists() else ""
print(json.dumps(results))
