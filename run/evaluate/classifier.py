"""A feature space for FID and recall on small digits: a classifier trained on the spot.

It is not Inception: its numbers compare models on this data with each other and with nothing else.
"""

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ogdm_core import trust
from ogdm_core.cli import bar_interval
from ogdm_core.files import atomic_write
from ogdm_core.images import Images

# What torch.load and load_state_dict raise for a damaged file, or one of another kind.
UNREADABLE = (
    RuntimeError, pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError, EOFError, OSError,
)  # fmt: skip
BATCH = 64


class Classifier(nn.Module):
    """Three convolutions and a hidden layer, whose 64 pre-activations are the features.

    size   side of the images that it was trained on; 0: not known
    """

    def __init__(self, channels: int, classes: int, size: int = 0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 64),
        )  # fmt: skip
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, classes))
        self.register_buffer("scale", torch.ones(()))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    @torch.no_grad()
    def features(self, x: Tensor, batch: int = 500) -> Tensor:
        """[N, C, H, W] in [-1, 1] -> [N, 64]; pixels are rounded to 8 bits first."""
        x = ((x.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
        return torch.cat([self.body(part) for part in x.split(batch)]) / self.scale


def train_classifier(images: Images, epochs: int = 20, seed: int = 0) -> tuple[Classifier, float]:
    """A classifier of the set's labels, and its accuracy on the tenth that was held out.

    Features are scaled to a mean variance of 1 over the set, so that FID has a readable size.
    One thread, so that the result is the same on any number of cores.
    """
    if images.labels is None:
        raise ValueError(
            "these images have no labels to train a classifier on; give folders or an npz with labels, or "
            "--classifier FILE from a labelled set of the same size"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Classifier(images.channels, images.classes, images.size)
        order = torch.randperm(len(images))
        held, train = order[: len(order) // 10], order[len(order) // 10 :]
        each = len(train) // BATCH  # steps of an epoch
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        anneal = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * each)
        for _ in tqdm(range(epochs), "classifier", unit=" epochs", mininterval=bar_interval()):
            for part in train[torch.randperm(len(train))][: each * BATCH].split(BATCH):
                loss = nn.functional.cross_entropy(net(images.batch(part)), images.labels[part])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                anneal.step()
        net.eval().requires_grad_(False)
        net.scale = net.features(images.all()).var(0).mean().sqrt()
        accuracy = (net(images.batch(held)).argmax(1) == images.labels[held]).float().mean()
    torch.set_num_threads(threads)
    return net, float(accuracy)


def save_classifier(path: Path, classifier: Classifier, accuracy: float) -> None:
    """Writes what `load_classifier` reads."""
    with atomic_write(path) as file:
        torch.save({"state": classifier.state_dict(), "accuracy": accuracy, "size": classifier.size}, file)


def load_classifier(path: Path, images: Images | None = None) -> tuple[Classifier, float]:
    """The classifier and its accuracy, as `train_classifier` gave them, if it fits the images."""
    try:
        saved = trust.load(path, map_location="cpu", weights_only=True)
        state = saved["state"]
        net = Classifier(state["body.0.weight"].shape[1], len(state["head.1.bias"]), saved.get("size", 0))
        net.load_state_dict(state)
        accuracy = float(saved["accuracy"])
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a classifier that run/quickstart.sh wrote, or is damaged ({error})") from error
    if images and (channels := net.body[0].in_channels) != images.channels:
        raise ValueError(f"{path} is for {channels} channels, the images have {images.channels}")
    if images and net.size not in (0, images.size):
        raise ValueError(f"{path} is for images of {net.size} pixels, these have {images.size}")
    return net.eval().requires_grad_(False), accuracy
