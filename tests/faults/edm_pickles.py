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


class Raw:
    """Pickles as given opcodes (protocol 2), where an object's would be."""

    def __init__(self, opcodes: bytes):
        self.opcodes = opcodes


def plain(value) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def gadget(name: str) -> Raw:
    """Sets source code as an attribute of the class that upstream's rebuild function reads it from."""
    meta = source(name, "EDMLoss")
    own = Path(sys.modules["training.loss"].__file__).read_text()
    on_class = b"cdnnlib.util\nEasyDict\n" + plain((None, {"module_src": meta["module_src"]})) + b"b0"
    rebuilt = plain(meta | {"module_src": own})
    return Raw(on_class + b"ctorch_utils.persistence\n_reconstruct_persistent_obj\n" + rebuilt + b"\x85R")


def attribute(name: str, key: str, value) -> Call:
    """Upstream's own class with one attribute more."""
    state = vars(EDMLoss()) | {key: value}
    own = Path(sys.modules["training.loss"].__file__).read_text()
    return Call(rebuild, source(name, "EDMLoss") | {"module_src": own, "state": state})


def attributes(network) -> list:
    """Classes and attributes of all modules but their weights and buffers."""
    return [(type(m), {k: repr(v) for k, v in vars(m).items() if k not in ("_parameters", "_buffers")})
            for m in network.modules()]  # fmt: skip


class Script(torch.nn.Module):
    """TorchScript, which torch.load would hand to torch.jit.load."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


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
    "its own source": attribute("its own source", "_orig_module_src", "x"),
    "its own method": attribute("its own method", "__call__", "x"),
    "a class": attribute("a class", "P_mean", torch.nn.Linear),
    "attribute of a class": gadget("attribute of a class"),  # the last one: with --trust it stays for good
}  # fmt: skip
states = {
    "good state": {"net": net, "optimizer_state": optimizer.state_dict()},
    "state": {"net": Call(*touch("state"))},
    "script": torch.jit.script(Script()),
}
results = {}
for name, content in (states | snapshots).items():
    try:
        if name in states:
            path = folder / "training-state-000001.pt"
            content.save(path) if name == "script" else torch.save(content, path)
            read = torch.load(path, map_location="cpu")
        else:
            raw = b"\x80\x02" + content.opcodes + b"." if isinstance(content, Raw) else pickle.dumps(content)
            read = compat.careful_pickle.load(io.BytesIO(raw))
        results[name] = "read"
    except trust.RefusedError as error:
        assert "\n" not in str(error) and ("--trust" in str(error) or name == "script")
        results[name] = "refused"
    except (checkpoints.DamagedError, AssertionError):
        results[name] = "failed"
    if name.startswith("good"):
        back, there = read["net" if name in states else "ema"].state_dict(), net.state_dict()
        assert all(torch.equal(back[key], there[key]) for key in there)
        assert attributes(read["net" if name in states else "ema"]) == attributes(net)
    results[name] += " and ran code" if (folder / name).exists() else ""
print(json.dumps(results))
