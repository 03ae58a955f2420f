"""An observed model without randomness of its own: the same numbers in any batch, on any rank."""

import torch

from ogdm_core.ldm.train import OGDMLatentDiffusion


class PerSample(OGDMLatentDiffusion):
    """t, noise and s follow from the sample and the step alone."""

    def setup(self, stage):
        super().setup(stage)
        observe = self.observer.observe
        self.observer.observe = lambda **kw: observe(s=kw["t"].clamp(max=20), **kw)

    def shared_step(self, batch):
        self._index = batch["index"].tolist()
        return super().shared_step(batch)

    def get_first_stage_encoding(self, posterior):
        return posterior.mode()

    def forward(self, x, c):
        generators = [torch.Generator().manual_seed(i + 1000 * self.global_step) for i in self._index]
        t = torch.stack([torch.randint(self.num_timesteps, (), generator=g) for g in generators])
        noise = torch.stack([torch.randn(x.shape[1:], generator=g) for g in generators])
        return self.p_losses(x, c, t.to(x.device), noise.to(x.device))
