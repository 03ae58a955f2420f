"""The two LoRA examples, on tiny pipelines that are saved and loaded like those of the hub."""

import json
import shutil

import pytest
import torch
from PIL import Image

from tests.examples.test_examples import example
from tests.examples.tiny_pipelines import TEXTS, captioned_images, stable_diffusion, stable_diffusion_3

KINDS = {"epsilon": "text_to_image_lora", "v_prediction": "text_to_image_lora", "flow": "flow_matching_transformer"}
STEPS = ["--save-every", "5", "--steps"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """{kind: (the example, its first flags)}."""
    modules = {kind: example(name) for kind, name in KINDS.items()}
    root = tmp_path_factory.mktemp("text-to-image")
    data = captioned_images(root / "data")
    models = {kind: root / kind for kind in KINDS}
    for kind in ("epsilon", "v_prediction"):
        stable_diffusion(models[kind], kind)
    stable_diffusion_3(models["flow"])
    common = ["--resolution", "16", "--batch-size", "4", "--learning-rate", "0.01", "--rank", "2"]
    return {k: (modules[k], ["--model", str(models[k]), "--data", str(data), *common, *STEPS]) for k in KINDS}


def pipeline_class(module):
    return next(v for n, v in vars(module).items() if n.startswith("StableDiffusion"))


def picture(pipeline, prompt="green"):
    options = {"num_inference_steps": 4, "height": 16, "width": 16, "output_type": "pt"}
    return pipeline(prompt, generator=torch.Generator().manual_seed(0), **options).images


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_a_resume_and_a_sample_in_plain_diffusers(kind, material, tmp_path, monkeypatch, capsys):
    module, flags = material[kind]
    module.main([*flags, "10", "--output", str(tmp_path / "whole")])
    assert "gamma x emission" in capsys.readouterr().out
    with Image.open(tmp_path / "whole" / "samples.png") as image:
        assert image.size == (64, 16)

    plain_step = module.Observer.step

    def interrupted(self, lr_scale):
        if self.steps == 7:
            raise KeyboardInterrupt
        plain_step(self, lr_scale)

    flags = [*flags, "10", "--output", str(tmp_path / "halved")]
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(module.Observer, "step", interrupted)
        module.main(flags)
    module.main([*flags, "--resume"])
    whole, halved = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in ("whole", "halved"))
    assert whole["step"] == halved["step"] == 10 and whole["lora"]
    d_states = [state["observer"] for state in (whole, halved)]
    assert [d["steps"] for d in d_states] == [10, 10] and d_states[0]["shape"] == d_states[1]["shape"]
    for a, b, parts in ((whole, halved, ("lora", "optimizer")), (*d_states, ("discriminator", "optimizer"))):
        for part in parts:
            torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)

    pipeline = pipeline_class(module).from_pretrained(flags[1])
    before = picture(pipeline)
    pipeline.load_lora_weights(tmp_path / "whole")
    after = picture(pipeline)
    assert bool(after.isfinite().all()) and not torch.equal(after, before)
    pipeline.unload_lora_weights()
    assert torch.equal(picture(pipeline), before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_observer_is_told_the_truth(kind, material, tmp_path, monkeypatch):
    module, flags = material[kind]
    seen, plain_observe = [], module.Observer.observe

    def observe(self, **given):
        seen.append((self, given))
        return plain_observe(self, **given)

    monkeypatch.setattr(module.Observer, "observe", observe)
    module.main([*flags, "2", "--output", str(tmp_path)])
    for observer, o in seen:
        schedule, t = observer.schedule, o["t"]
        torch.testing.assert_close(o["x_t"], schedule.diffuse(o["x_0"], o["eps"], t), rtol=1e-4, atol=1e-4)
        error = (o["eps_t"] - o["eps"]).detach().square().flatten(1).mean(1)
        ratio = torch.ones(len(t)) if kind == "epsilon" else schedule.a(t).float() ** 2  # dv = deps / a
        torch.testing.assert_close(error, o["transition"].detach() * ratio, rtol=1e-3, atol=1e-5)
        assert o["label"].shape == (4, observer.D.labels) and len(o["label"].unique(dim=0)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epsilon", "flow"])
def test_the_emission_reaches_the_lora(kind, material, tmp_path):
    module, flags = material[kind]
    found = []
    for rho in ("0", "20"):
        module.main([*flags, "3", "--output", str(tmp_path / rho), "--rho", rho])
        found.append(torch.load(tmp_path / rho / "checkpoint.pt", weights_only=True)["lora"])
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
def test_an_image_without_a_text_is_named(material, tmp_path, refused):
    module, flags = material["epsilon"]
    folder = shutil.copytree(flags[3], tmp_path / "data")
    rows = (folder / "metadata.jsonl").read_text().splitlines()
    (folder / "metadata.jsonl").write_text("\n".join(rows[:-1]))
    with refused("no text for 1 images, such as 5.png"):
        module.main(["--model", flags[1], "--data", str(folder), "--resolution", "16"])
    assert json.loads(rows[-1])["text"] == TEXTS[-1]
