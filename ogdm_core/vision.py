"""Stand-ins for the parts of absent packages, mostly torchvision's, that upstreams import or call."""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch.nn.functional import pad

ADVICE = "install a torchvision that matches your torch (conda does)"


class Partial(types.ModuleType):
    """A module of which a part is here; any other attribute raises ImportError with advice."""

    def __init__(self, name: str, advice: str, **content):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = []
        self.__dict__.update(content, _advice=advice)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self.__name__}.{name} is not here: {self._advice}")


def provide_torchvision(**parts: dict[str, Any]) -> None:
    """Puts a torchvision in place of which these modules are here, each with these names."""
    modules = {name: Partial(f"torchvision.{name}", ADVICE, **content) for name, content in parts.items()}
    top = Partial("torchvision", ADVICE, **modules)
    sys.modules.update({module.__name__: module for module in (top, *modules.values())})


def make_grid(images: torch.Tensor, nrow: int = 8, padding: int = 2) -> torch.Tensor:
    """One image [C, H, W] of many [N, C, h, w], row by row, with a black frame around each.

    Grey images become RGB; a single image ([C, h, w], or N = 1) stays without a frame.
    """
    images = images[(None,) * (4 - images.dim())]
    n, channels = images.shape[:2]
    images = images.expand(-1, 3 if channels == 1 else channels, -1, -1)
    if n == 1:
        return images[0]
    columns = min(nrow, n)
    rows = -(-n // columns)
    images = pad(images, (padding, 0, padding, 0, 0, 0, 0, rows * columns - n))
    grid = images.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)  # 3, rows, h, columns, w
    return pad(grid.flatten(3).flatten(1, 2), (0, padding, 0, padding))


class RandomHorizontalFlip:
    """Mirrors a PIL image with probability p, by one draw of torch's."""

    def __init__(self, p: float = 0.5):
        self.p = p

    def __call__(self, image):
        from PIL import ImageOps  # not one of the core's packages

        return ImageOps.mirror(image) if torch.rand(1) < self.p else image
