"""EDM2's train.py by itself: no clone of upstream is needed."""

import click
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from ogdm_core.config import OGDMConfig
from ogdm_core.edm import train as edm
from ogdm_core.edm2 import train

U = 0.7  # the learned logarithm of the loss


class Net(torch.nn.Module):
    """A denoiser with EDM2's interface."""

    img_channels, img_resolution, label_dim, sigma_data = 1, 8, 3, 0.5
    sigma_min, sigma_max = 0, float("inf")

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 1, 3, padding=1)
        self.modes = []

    def forward(self, x, sigma, class_labels=None, return_logvar=False, augment_labels=None):
        self.modes.append((self.training, self.conv.training))
        denoised = self.conv(x) + class_labels.sum(1).reshape(-1, 1, 1, 1)
        return (denoised, torch.full((len(x), 1, 1, 1), U)) if return_logvar else denoised


def parts(net, images, labels, **extra):
    torch.manual_seed(1)
    sigma = torch.rand(len(images), 1, 1, 1) + 0.5
    weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    return weight, net(images + torch.randn_like(images) * sigma, sigma, labels, **extra)


class Edm2Loss:
    def __call__(self, net, images, labels=None):
        weight, (denoised, u) = parts(net, images, labels, return_logvar=True)
        return weight / u.exp() * (denoised - images) ** 2 + u


class EdmLoss:
    def __call__(self, net, images, labels=None, augment_pipe=None):
        weight, denoised = parts(net, images, labels)
        return weight * (denoised - images) ** 2


@pytest.mark.parametrize("settings", [{"rho": 10.0}, {"gamma": 0.05}, {"rho": 10.0, "projection": "heun"}])
def test_the_emissions_weight_means_what_it_means_on_edm(settings):
    """EDM2 divides EDM's loss by e^u; the emission is divided alike, so that their ratio is the same."""
    images, labels = torch.rand(4, 1, 8, 8), torch.eye(3)[[0, 1, 2, 0]]
    torch.manual_seed(0)
    net, config = Net(), OGDMConfig(d_width=0.02, **settings)
    ours = train.Session(config, net, Edm2Loss(), steps=10, base_lr=1e-2, run_dir="")
    theirs = edm.Session(config, net, net, EdmLoss(), torch.optim.Adam(net.parameters()), steps=10)
    net.modes.clear()  # D's cost was counted
    loss = ours.loss_fn(net, images, labels)
    plain = theirs.loss_fn(net, images, labels)
    torch.testing.assert_close((loss - U) * torch.tensor(U).exp(), plain)
    torch.testing.assert_close(ours.loss_fn.emission * torch.tensor(U).exp(), theirs.loss_fn.emission)
    assert ours.loss_fn.emission.abs().min() > 0
    if "projection" in settings:  # the layers of Heun's second pass keep their weights; their parents train
        assert net.modes[1] == (True, False) and net.conv.training


def test_ds_rate_follows_upstreams_schedule():
    torch.manual_seed(0)
    made = train.Session(OGDMConfig(d_width=0.02, d_lr=1e-3), Net(), Edm2Loss(), steps=10, base_lr=1e-2, run_dir="")
    made.loss_fn(made.net, torch.rand(4, 1, 8, 8), torch.eye(3)[[0, 1, 2, 0]])
    made.step(lr=5e-3)
    assert made.observer.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_the_log_says_how_the_learning_rate_goes():
    options = {"lr_kwargs": {"ref_lr": 0.01, "ref_batches": 70000}, "batch_size": 2048, "total_nimg": 2**31}
    said = train._rate(options)
    assert "rises from 0 to 0.01 over 10 million images, and falls" in said and "after 143.36 million" in said
    options["lr_kwargs"] |= {"rampup_Mimg": 0, "ref_batches": 0}
    assert train._rate(options).startswith("the learning rate is 0.01 at once, and stays")


def test_pictures_that_upstream_asserts_away_are_refused_by_name(tmp_path):
    @click.command()
    @click.option("--data")
    @train.train_options
    def main(**kwargs):
        click.echo("trains")

    Image.new("RGB", (16, 12)).save(tmp_path / "0.png")
    flags = [f"--data={tmp_path}"]
    assert CliRunner().invoke(main, flags).output == "trains\n"
    assert "0.png is 16x12" in CliRunner().invoke(main, [*flags, "--ogdm"]).output
