"""run/export.sh on small networks of the real upstreams: equal outputs, or a reason and no diffusers folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from run.export import flags

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("edm-adm", "edm-adm-cond", "adm", "adm-heads", "adm-new-order")
REASONS = {
    "edm-ddpmpp": r"SongUNet .* divides each block's sum by sqrt\(2\)",
    "edm-narrow": r"normalisations have \[16, 32\] groups",
    "edm-vp": "VPPrecond scales",
    "adm-unequal": r"attentions have \[8, 16\] channels per head",
}


def python(*words):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def exported(patched, tmp_path_factory):
    """exported(kind) -> (checkpoint, folder, what the command said)."""
    pytest.importorskip("diffusers")
    third_party, folder = patched("edm").parent, tmp_path_factory.mktemp("exported")
    assert patched("guided-diffusion").parent == third_party
    done = python(ROOT / "tests/run/export_networks.py", third_party, folder)
    assert done.returncode == 0, done.stderr

    def get(kind):
        names = {"network-snapshot-000001.pkl", "ema_0.9999_000001.pt"}
        (checkpoint,) = (file for file in (folder / kind / "run").iterdir() if file.name in names)
        return checkpoint, folder / kind / "out", (folder / kind / "said.txt").read_text()

    return get


@pytest.mark.parametrize("kind", EXACT)
def test_an_exact_architecture_becomes_a_diffusers_folder_with_equal_outputs(kind, exported):
    from diffusers import DDPMScheduler, EDMEulerScheduler, UNet2DModel

    checkpoint, out, said = exported(kind)
    assert "status 0" in said, said
    assert "outputs are equal" in said
    unet = UNet2DModel.from_pretrained(out / "unet").eval()
    asked = torch.load(checkpoint.with_name("answer.pt"), weights_only=True)
    with torch.no_grad():
        found = unet(asked["x"], asked["t"], class_labels=asked["label"]).sample
    torch.testing.assert_close(found, asked["answer"], rtol=1e-3, atol=1e-4 * float(asked["answer"].abs().max()))
    assert load_file(out / "model.safetensors")
    described = json.loads((out / "model.json").read_text())
    scheduler = (EDMEulerScheduler if kind.startswith("edm") else DDPMScheduler).from_pretrained(out / "scheduler")
    if kind.startswith("adm"):
        assert described["flags"]["noise_schedule"] == ("cosine" if kind == "adm-new-order" else "linear")
        assert (scheduler.config.variance_type == "learned_range") == (kind == "adm-heads")
    card = (out / "README.md").read_text()
    for text in ("diffusers\n", "| heun | 11 | 3.21 | 0.5 | -- |", "`run/train.sh x`", "| data | CIFAR-10 |"):
        assert text in card
    assert str(checkpoint.parent) not in card + json.dumps(described)


@pytest.mark.parametrize("kind", REASONS)
def test_an_architecture_that_diffusers_lacks_is_named_and_left_out(kind, exported):
    _, out, said = exported(kind)
    assert "status 0" in said, said
    assert not (out / "unet").exists() and not (out / "scheduler").exists()
    for text in (said, (out / "README.md").read_text()):
        assert re.search(REASONS[kind], text), text
    assert (out / "model.safetensors").is_file() and (out / "model.json").is_file()


def test_adms_pipeline_samples_and_its_schedule_is_upstreams(exported, patched):
    from diffusers import DDIMScheduler, DDPMPipeline

    _, out, _ = exported("adm-new-order")
    pipeline = DDPMPipeline.from_pretrained(out)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from guided_diffusion import gaussian_diffusion as g; "
        "print(*(1 - g.get_named_beta_schedule('cosine', 1000)).cumprod())"
    )
    theirs = python("-c", program, patched("guided-diffusion")).stdout.split()
    theirs = torch.tensor([float(a) for a in theirs])
    torch.testing.assert_close(pipeline.scheduler.alphas_cumprod, theirs, rtol=1e-4, atol=1e-6)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    images = pipeline(batch_size=2, num_inference_steps=3, output_type="np").images
    assert images.shape == (2, 16, 16, 3)


def test_the_cards_loop_for_edm_runs(exported, monkeypatch):
    _, out, _ = exported("edm-adm")
    program = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(out.parent)
    found = {}
    exec(program, found)
    assert found["images"].shape == (16, 3, 16, 16) and bool(found["images"].isfinite().all())


def test_flags_that_do_not_fit_are_refused_and_nothing_is_written(exported):
    _, out, said = exported("adm-wrong")
    assert "other flags (num_channels: 32 there, 64 here)" in said and "status 2" in said and not out.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["edm", "absent.pkl", "x"], "there is no file absent.pkl"),
        (["edm", __file__, "x", "--", "--num_heads", "1"], "knows its network"),
        (["ldm", __file__, "x"], "invalid choice"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(words, complaint, refused):
    with refused(complaint):
        flags.parse(words)
