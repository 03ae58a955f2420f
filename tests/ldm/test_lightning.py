"""What latent-diffusion relies on in Lightning, without latent-diffusion."""

import pytest
import torch
from torch.utils.data import DataLoader

pl = pytest.importorskip("pytorch_lightning", reason="the ldm extra is not installed")
from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: E402

from ogdm_core.ldm.lightning import OldHooks  # noqa: E402


class Worsening(pl.LightningModule):
    """Its first validation is its best."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        return self.net(batch).sum()

    def validation_step(self, batch):
        self.log("val", float(self.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_last_ckpt_is_the_last_model_even_if_an_earlier_one_is_better(tmp_path):
    saved = ModelCheckpoint(tmp_path, "{epoch}", monitor="val", save_top_k=1, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=7, callbacks=[OldHooks(), saved], logger=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data, model = DataLoader(torch.ones(3, 1)), Worsening()
    trainer.fit(model, data, data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch=0.ckpt", "last.ckpt"]
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert last["global_step"] == 7 and last["epoch"] == 2
    assert torch.equal(last["state_dict"]["net.bias"], model.net.bias)
