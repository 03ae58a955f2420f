"""The training loop on the README's first screen runs as it is printed."""

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[2] / "README.md"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x, index):
        return self.conv(x) + index.reshape(-1, 1, 1, 1) / 1000


def test_the_loop_trains_and_samples():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S).group(1)
    assert len(code.strip().splitlines()) <= 16
    torch.manual_seed(0)
    net = Net()
    names = {
        "torch": torch, "device": "cpu", "net": net, "loader": [torch.rand(2, 3, 32, 32)],
        "optimizer": torch.optim.Adam(net.parameters()), "noise": torch.randn(2, 3, 32, 32),
    }  # fmt: skip
    before = net.conv.weight.detach().clone()
    exec(code.replace("k=0.2, gamma=0.025", 'k=0.2, gamma=0.025, d_kind="light"'), names)  # noqa: S102
    assert names["observer"].steps == 1 and not torch.equal(net.conv.weight, before)
    assert names["images"].shape == (2, 3, 32, 32) and bool(names["images"].isfinite().all())
