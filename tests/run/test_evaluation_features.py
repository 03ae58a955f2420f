"""One contract for every feature net: uint8 images in, floating-point features out."""

import sys

import pytest
import torch

from run.evaluate import features
from run.evaluate.classifier import Classifier, save_classifier
from run.evaluate.features import load_features

NET = """
import torch
from torch import nn
from run.evaluate.classifier import Classifier

def flat(images):
    assert images.dtype == torch.uint8 and images.shape[1] == 3
    return images.float().flatten(1)[:, :6] / 64

def forgets_to_scale(images): return images.flatten(1)
def as_floats(images): return nn.functional.conv2d(images, torch.ones(1, 3, 1, 1)).flatten(1)
def wrong(images): return images.float()
def both(images): return images.float().flatten(1), images.float().flatten(1)

class Net(nn.Module):
    def __init__(self, cache):
        super().__init__()
        self.where = cache
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, images):
        assert not self.training
        return images.float().flatten(1)[:, :6] * self.scale

digits = Classifier(1, 10)
number = 3
"""


def needs_inception():
    if features.importlib.util.find_spec("torch_fidelity") is None:
        pytest.skip("torch-fidelity is not installed")


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=generator)


@pytest.fixture
def smallnet(tmp_path, monkeypatch):
    (tmp_path / "smallnet.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "smallnet", raising=False)


def test_nets_by_import_path(smallnet, images, tmp_path):
    flat = load_features("smallnet:flat")
    assert flat.name == "smallnet:flat"
    assert torch.equal(flat(images), images.float().flatten(1)[:, :6] / 64)
    assert flat(images[:, :1]).shape == (5, 6)  # grey images get three channels
    net = load_features("smallnet:Net", cache=tmp_path)
    assert net.net.where == tmp_path and net(images).shape == (5, 6)
    assert net.key == load_features("smallnet:Net").key
    assert load_features("smallnet:digits")(images).shape == (5, 64)


def test_pixels_and_the_quickstarts_classifier(tmp_path, images):
    assert torch.equal(load_features("pixels")(images), images.flatten(1) / 127.5 - 1)
    net = Classifier(1, 10).eval()
    save_classifier(tmp_path / "c.pt", net, 0.9)
    ours = load_features(str(tmp_path / "c.pt"))(images[:, :1])
    torch.testing.assert_close(ours, net.features(images[:, :1] / 127.5 - 1))
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match="not a classifier"):
        load_features(str(tmp_path / "text.pt"))


def test_a_classifier_of_images_of_another_size_is_refused(tmp_path, images):
    file = tmp_path / "c.pt"
    save_classifier(file, Classifier(1, 10, 8).eval(), 0.9)
    assert load_features(str(file))(images).shape == (5, 64)  # samples of a grey data set may have colours
    with pytest.raises(ValueError, match=r"c.pt was made for images of 8x8, these are 4x8; .*--features lite0"):
        load_features(str(file))(images[..., :4])


def test_the_net_that_installs_tells_blurred_images_from_sharp_ones(images):
    pytest.importorskip("efficientnet_lite_pytorch")
    nets = [load_features(name) for name in ("lite0", "lite0-64")]
    assert nets[0].key != nets[1].key
    for net in nets:
        x = net(images)
        assert x.shape == (len(images), 1280) and bool(x.isfinite().all()) and float(x.std()) > 0
        assert torch.equal(x, net(images)) and not torch.allclose(x, net(images.flip(3)), atol=1e-3)


def test_a_broken_contract_is_an_error(smallnet, images):
    flat = load_features("smallnet:flat")
    with pytest.raises(ValueError, match=r"takes uint8 images.*not torch.float32"):
        flat(images / 127.5 - 1)
    with pytest.raises(ValueError, match=r"gave torch.uint8 \(5, 192\).*must give \[5, D\]"):
        load_features("smallnet:forgets_to_scale")(images)
    with pytest.raises(ValueError, match="failed on uint8 images"):
        load_features("smallnet:as_floats")(images)
    with pytest.raises(ValueError, match=r"gave torch.float32 \(5, 3, 8, 8\)"):
        load_features("smallnet:wrong")(images)
    with pytest.raises(ValueError, match="gave tuple"):
        load_features("smallnet:both")(images)


@pytest.mark.parametrize(
    ("spec", "weights", "text"),
    [
        (None, None, "--weights FILE"),
        (None, "none.pth", "no such file"),
        ("smallnet:flat", "none.pth", "leave it out"),
        ("smallnet", None, "MODULE:NAME"),
        ("none.pt", None, "no such file"),
        ("smallnet:nothing", None, "cannot be imported"),
        ("smallnet:number", None, "cannot be called"),
    ],
)
def test_errors_say_what_to_do(smallnet, tmp_path, spec, weights, text):
    with pytest.raises(ValueError, match=text):
        load_features(spec, weights and tmp_path / weights)


@pytest.mark.parametrize("content", [{"a": torch.zeros(1)}, None])
def test_weights_of_another_kind_are_refused(tmp_path, content):
    needs_inception()
    file = tmp_path / "other.pth"
    torch.save(content, file) if content else file.write_text("hello")
    with pytest.raises(ValueError, match="not torch-fidelity's Inception"):
        load_features(None, file)


def test_inception_and_the_weights_that_are_not_the_published_ones(tmp_path, images, monkeypatch):
    """With random weights: the shape, and the note."""
    needs_inception()
    port = features._port()
    monkeypatch.setattr(port, "load_state_dict", lambda self, state: None)
    monkeypatch.setattr(features, "_port", lambda: port)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: {})
    file = tmp_path / "mine.pth"
    file.write_bytes(b"mine")
    with torch.random.fork_rng():
        net = load_features(None, file)
    assert net(images[:2]).shape == (2, 2048)
    digest = features.sha256(file)
    assert net.notes[0].startswith(
        f"mine.pth is not the published file: its SHA-256 begins with {digest[:8]}, not 6726825d"
    )
    monkeypatch.setattr(features, "PUBLISHED", digest[:8])
    with torch.random.fork_rng():
        assert load_features(None, file).notes == ()
