"""Small checkpoints of upstreams' networks with random weights, and what run/export.sh makes of them.

export_networks.py THIRD_PARTY FOLDER    writes FOLDER/KIND/run/CHECKPOINT, FOLDER/KIND/out and FOLDER/KIND/said.txt
"""

import contextlib
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ogdm_core.files import write_json  # noqa: E402
from run import backbones  # noqa: E402
from run.export import __main__ as export  # noqa: E402

SIZE = {"img_resolution": 16, "img_channels": 3}
EDM = {  # kind: label_dim, class of the preconditioning, its keywords
    "edm-adm": (0, "EDMPrecond", {"model_type": "DhariwalUNet", "model_channels": 128, "channel_mult": [1, 2],
                                  "num_blocks": 1, "attn_resolutions": [8]}),
    "edm-adm-cond": (5, "EDMPrecond", {"model_type": "DhariwalUNet", "model_channels": 128, "channel_mult": [1, 1],
                                       "num_blocks": 2, "attn_resolutions": [16, 8], "augment_dim": 9}),
    "edm-ddpmpp": (0, "EDMPrecond", {"model_type": "SongUNet", "model_channels": 16, "channel_mult": [1, 1],
                                     "num_blocks": 1, "attn_resolutions": [8]}),
    "edm-narrow": (0, "EDMPrecond", {"model_type": "DhariwalUNet", "model_channels": 64, "channel_mult": [1, 1],
                                     "num_blocks": 1, "attn_resolutions": [8]}),
    "edm-vp": (0, "VPPrecond", {"model_type": "DhariwalUNet", "model_channels": 128, "channel_mult": [1],
                                "num_blocks": 1, "attn_resolutions": []}),
}  # fmt: skip
ADM = {  # kind: flags
    "adm": {"channel_mult": "1,2", "num_heads": 1, "attention_resolutions": "8"},
    "adm-heads": {"channel_mult": "1,2", "num_heads": 4, "attention_resolutions": "8", "class_cond": True,
                  "resblock_updown": True, "learn_sigma": True},
    "adm-new-order": {"channel_mult": "1,1", "num_head_channels": 16, "attention_resolutions": "16,8",
                      "use_new_attention_order": True, "use_scale_shift_norm": False, "noise_schedule": "cosine"},
    "adm-unequal": {"channel_mult": "1,2", "num_heads": 4, "attention_resolutions": "16,8"},
}  # fmt: skip


def scrambled(net):
    """Its state dict with random weights in place of upstream's zeros."""
    generator = torch.Generator().manual_seed(0)
    state = net.state_dict()
    for name, value in state.items():
        if not name.endswith("resample_filter"):
            value.copy_(0.1 * torch.randn(value.shape, generator=generator) + (value.ndim == 1 and "norm" in name))
    return state


@torch.no_grad()
def answer(file, net, t, *condition, label=None):
    """Keeps a question to upstream's network and its answer beside the checkpoint."""
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    torch.save({"x": x, "t": t, "label": label, "answer": net(x, t, *condition)}, Path(file).with_name("answer.pt"))


def edm(kind, third_party, file):
    """A snapshot of EDM's."""
    backbone = backbones.get("edm")
    backbone.pickle(third_party)
    from training import networks

    label_dim, precond, keywords = EDM[kind]
    keywords = SIZE | {"label_dim": label_dim} | keywords
    state = scrambled(getattr(networks, precond)(**keywords))
    kept = {"constructor": json.dumps([precond, [], keywords])}
    backbone.unpack(state, kept, file, third_party)
    net = backbone.build(state, kept, third_party).model
    classes, label = (torch.eye(label_dim)[:2], torch.arange(2)) if label_dim else (None, None)
    answer(file, net, torch.tensor([-1.0, 0.5]), classes, label=label)


def adm(kind, third_party, file):
    """An average of ADM's, with flags.json beside it."""
    sys.path.insert(0, str(third_party / "guided-diffusion"))
    from guided_diffusion.script_util import create_model, model_and_diffusion_defaults

    flags = model_and_diffusion_defaults()
    flags |= {"image_size": 16, "num_channels": 32, "num_res_blocks": 1} | ADM[kind]
    names = create_model.__code__.co_varnames[: create_model.__code__.co_argcount]
    net = create_model(**{n: flags[n] for n in names}).eval()
    torch.save(scrambled(net), file)
    write_json(file.with_name("flags.json"), flags)
    label = torch.arange(2) if flags["class_cond"] else None
    answer(file, net, torch.tensor([3, 700]), *([] if label is None else [label]), label=label)


def main(third_party: Path, folder: Path) -> None:
    """Every kind, one after the other; in one process, since imports take longest."""
    scores = {
        "fid": 3.21, "precision": 0.5, "recall": None, "features": "inception", "samples": "a/samples.npz",
        "sample_images": 50_000, "sampling": {"sampler": "heun", "nfe": 11},
    }  # fmt: skip
    write_json(folder / "fid.json", scores)
    for kind in (*EDM, *ADM, "adm-wrong"):
        backbone, home = kind.split("-")[0], folder / kind
        (home / "run").mkdir(parents=True)
        file = home / "run" / ("network-snapshot-000001.pkl" if backbone == "edm" else "ema_0.9999_000001.pt")
        wrong = kind == "adm-wrong"
        (edm if backbone == "edm" else adm)("adm" if wrong else kind, third_party, file)
        words = [backbone, file, home / "out", "--third-party", third_party, "--scores", folder / "fid.json"]
        words += ["--command", "run/train.sh x", "--data", "CIFAR-10"] + wrong * ["--", "--num_channels", "64"]
        with (home / "said.txt").open("w") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code = export.main([str(word) for word in words])
            except SystemExit as end:
                code = end.code
            print(f"status {code}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
