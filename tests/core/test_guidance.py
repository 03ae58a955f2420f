"""Discriminator guidance: its sign, scale, cost and file; a guide that is trained on the spot."""

import numpy as np
import pytest
import torch
from torch import nn

from ogdm_core import DiscreteVP, KarrasVE, sample
from ogdm_core.checkpoints import read_safetensors
from ogdm_core.guidance import (
    Guide,
    correction,
    gradient_plan,
    guided,
    guided_nfe,
    load_guide,
    save_guide,
)
from ogdm_core.images import Images
from ogdm_core.nfe import SAMPLERS, Sampler
from ogdm_core.samplers import FUNCTIONS
from ogdm_core.schedule import expand
from ogdm_core.solvers import project
from run.guidance.__main__ import main
from run.guidance.train import train_guide
from tests.core.toys import SCHEDULES

DATA, MODEL = 0.5, 0.8  # standard deviations of two Gaussians


class Ratio(nn.Module):
    """A best guide: log q / p of N(0, (DATA^2 + sigma^2) I) and N(0, (MODEL^2 + sigma^2) I)."""

    def forward(self, y, sigma, label=None):
        norm = y.flatten(1).square().sum(1)
        return norm / 2 * (1 / (MODEL**2 + sigma**2) - 1 / (DATA**2 + sigma**2))


def gaussian(std, schedule):
    """The exact eps of data N(0, std^2 I): b_t x_t / (a_t^2 std^2 + b_t^2)."""

    def eps_fn(x, t):
        a, b = expand(schedule.a(t), x), expand(schedule.b(t), x)
        return b * x / (a**2 * std**2 + b**2)

    return eps_fn


def some_times(schedule):
    return torch.tensor(schedule.times(6)[:-1], dtype=schedule.time_dtype(torch.float64))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_guided_eps_is_the_datas_own(kind):
    schedule = SCHEDULES[kind]()
    t = some_times(schedule)
    x = torch.randn(len(t), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, data = gaussian(MODEL, schedule), gaussian(DATA, schedule)
    found = guided(model, Ratio(), schedule)(x, t)
    torch.testing.assert_close(found, data(x, t))
    half = guided(model, Ratio(), schedule, weight=0.5)(x, t)
    torch.testing.assert_close(half, (model(x, t) + data(x, t)) / 2)


@pytest.mark.parametrize("sampler", ["euler", "heun", "s-pndm", "f-pndm"])
def test_guided_samples_have_the_datas_spread(sampler):
    schedule = KarrasVE()
    x_T = schedule.prior(torch.tensor([[1.0]], dtype=torch.float64))
    nfe = SAMPLERS[sampler].nfe(100)
    eps_fn = guided(gaussian(MODEL, schedule), Ratio(), schedule, plan=gradient_plan(sampler, nfe))
    assert sample(eps_fn, x_T, schedule, sampler=sampler, nfe=nfe).item() == pytest.approx(DATA, rel=0.06)
    plain = sample(gaussian(MODEL, schedule), x_T, schedule, sampler=sampler, nfe=nfe).item()
    assert plain == pytest.approx(MODEL, rel=0.06)


def heun_to_the_data(eps_fn, x, times, schedule):
    """Heun's method with two evaluations in its last step, too: a sampler that is not in the table."""
    for t, u in zip(times[:-1], times[1:], strict=True):
        x = project("heun", schedule, x, t, u, eps_fn(x, t), eps_fn)
        yield x


@pytest.mark.parametrize("sampler", [*SAMPLERS, "new"])
def test_one_gradient_per_step_but_the_last(sampler, monkeypatch):
    if sampler == "new":
        monkeypatch.setitem(SAMPLERS, sampler, Sampler("New", each=2))
        monkeypatch.setitem(FUNCTIONS, sampler, heun_to_the_data)
    steps, asked, graded = 7, [], []
    nfe = SAMPLERS[sampler].nfe(steps)
    schedule = DiscreteVP.linear()
    model = gaussian(MODEL, schedule)

    class Counted(Ratio):
        def forward(self, y, sigma, label=None):
            graded.append(float(sigma[0]))
            return super().forward(y, sigma)

    def eps_fn(x, t):
        asked.append(t)
        return model(x, t)

    eps_fn = guided(eps_fn, Counted(), schedule, plan=gradient_plan(sampler, nfe))
    sample(eps_fn, torch.randn(2, 3), schedule, sampler=sampler, nfe=nfe)
    starts = torch.tensor(schedule.times(steps)[:-2])
    assert graded == schedule.sigma(starts).tolist()
    assert len(asked) == nfe
    assert guided_nfe(sampler, nfe) == nfe + steps - 1


def test_edms_generate_samples_with_a_guide(monkeypatch):
    """Its few-step sampler, with the exact denoiser of the model's Gaussian as the network."""
    pytest.importorskip("click")
    from ogdm_core.edm import sample as sample_edm

    class Net:
        sigma_min, sigma_max = 0.0, float("inf")

        def __call__(self, x, sigma, class_labels):
            return x * (MODEL**2 / (MODEL**2 + expand(sigma, x) ** 2))

    monkeypatch.setattr(sample_edm, "load_guide", lambda path, device: Ratio())
    options = {"sampler": "heun", "nfe": 199, "guide": "any"}
    for weight, std in ((0.0, MODEL), (1.0, DATA)):
        x = sample_edm.few_steps(Net(), torch.ones(1, 1), None, torch.randn_like, guide_weight=weight, **options)
        assert x.item() == pytest.approx(std, rel=0.02)


def test_the_cost_is_that_of_table_7():
    assert [guided_nfe("heun", nfe) for nfe in (25, 17, 15, 11)] == [37, 25, 22, 16]


@pytest.mark.parametrize("kind", ["light", "paper"])
def test_a_guide_comes_back_from_its_file(tmp_path, kind):
    guide = Guide(1, 8, labels=3, width=0.05, kind=kind)
    save_guide(tmp_path / "guide.safetensors", guide, seed=4)
    again = load_guide(tmp_path / "guide.safetensors")
    y, sigma, label = torch.randn(5, 1, 8, 8), torch.rand(5), torch.tensor([0, 1, 2, 0, 1])
    torch.testing.assert_close(again(y, sigma, label), guide(y, sigma, label))
    assert again.settings == guide.settings
    assert not any(p.requires_grad for p in again.parameters())


@pytest.mark.parametrize("kind", ["light", "paper"])
def test_an_image_is_guided_by_itself_alone(kind):
    """Whatever stands beside it in the batch, and in double precision as EDM samples."""
    guide, schedule = Guide(1, 8, width=0.05, kind=kind), KarrasVE()
    x, t = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.full((4,), 0.7, dtype=torch.float64)
    together = correction(guide, x, t, schedule)
    alone = torch.cat([correction(guide, x[i : i + 1], t[:1], schedule) for i in range(4)])
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


def test_a_guide_means_the_same_on_every_schedule():
    """At equal sigma, y = x_t / a_t alone decides."""
    guide, vp, ve = Guide(1, 8), DiscreteVP.linear(), KarrasVE()
    y, t = torch.randn(3, 1, 8, 8), torch.tensor([20, 300, 600])
    sigma = vp.sigma(t).float()
    on_vp = correction(guide, y * expand(vp.a(t), y), t, vp)
    torch.testing.assert_close(on_vp, correction(guide, y, sigma, ve), rtol=1e-4, atol=1e-6)


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is not a guide"):
        load_guide(path)
    save_guide(path, Guide(1, 8))
    weights, about = read_safetensors(path)
    save_file(weights, path, about | {"channels": "x"})
    with pytest.raises(ValueError, match="weights.safetensors is damaged.*invalid literal.*guidance.sh train"):
        load_guide(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_guide(path)


def blobs(n, level, seed=0):
    """Images [N, 1, 8, 8] of one grey level with a little noise."""
    noise = np.random.default_rng(seed).normal(level, 10, (n, 1, 8, 8))
    return Images(noise.clip(0, 255).astype(np.uint8))


@pytest.mark.slow
def test_training_learns_to_point_at_the_data(capsys):
    bright, dark = blobs(200, 180), blobs(200, 80, seed=1)
    guide, loss = train_guide(bright, dark, steps=60, batch=32)
    assert loss < 0.6
    assert "step 60/60, loss" in capsys.readouterr().err
    again, _ = train_guide(bright, dark, steps=60, batch=32)
    assert all(map(torch.equal, guide.state_dict().values(), again.state_dict().values()))
    x, t = torch.zeros(4, 1, 8, 8), torch.full((4,), 0.5)
    # less eps from the image is more light in the denoised one
    assert correction(guide, x, t, KarrasVE()).mean() < 0


@pytest.mark.parametrize(("other", "words"), [
    (Images(np.zeros((40, 3, 8, 8), np.uint8)), "the samples have 3"),
    (Images(np.zeros((4, 1, 8, 8), np.uint8)), "4 samples are too few"),
])  # fmt: skip
def test_sets_that_do_not_fit_are_refused(other, words):
    with pytest.raises(ValueError, match=words):
        train_guide(blobs(40, 100), other)


def test_the_commands_sample_train_and_guide(tmp_path, capsys):
    """A model in diffusers' format: its samples, a guide, guided samples that differ."""
    pytest.importorskip("diffusers")
    model = "run/quickstart/baseline-digits"
    draw = ["sample", model, "--count", "24", "--nfe", "3"]
    assert main([*draw, "--output", f"{tmp_path}/a.npz"]) == 0
    plain = np.load(tmp_path / "a.npz")["arr_0"]
    assert plain.shape == (24, 8, 8, 3)  # an evaluator takes RGB even where the data is grey
    guide = f"{tmp_path}/guide.safetensors"
    assert main(["train", "--data", "digits", "--samples", f"{tmp_path}/a.npz", "--steps", "3",
                 "--batch-size", "8", "--output", guide]) == 0  # fmt: skip
    assert "0.6931 is chance" in capsys.readouterr().out
    assert main([*draw, "--guide", guide, "--output", f"{tmp_path}/b.npz"]) == 0
    assert "NFE 4" in capsys.readouterr().out
    assert not np.array_equal(plain, np.load(tmp_path / "b.npz")["arr_0"])
