"""The cases of the benchmark: settings of the method, and the naive schedule they improve on."""

from dataclasses import dataclass, field
from typing import Any

from ogdm_core.config import OGDMConfig

NARROW_WIDTH = 0.0625  # d_width of a narrow D of the paper's kind: 32 channels throughout


@dataclass(frozen=True)
class Case:
    """One way to train with observation guidance."""

    words: str
    settings: dict[str, Any] = field(default_factory=dict)  # OGDMConfig's that are not the defaults
    naive: bool = False  # evaluates the denoiser anew for the projection, and again for D's step

    @property
    def config(self) -> OGDMConfig:
        """The settings."""
        return OGDMConfig(**self.settings)

    def kinds(self) -> dict[str, float]:
        """Kinds of step and the share of each: `r1` takes the penalty, `plain` does not."""
        rare = 1 / self.config.r1_every if self.config.r1 > 0 else 0.0
        return {kind: share for kind, share in (("plain", 1 - rare), ("r1", rare)) if share}


FUSED, LIGHT, HEUN = {"fused": True}, {"d_kind": "light"}, {"projection": "heun"}
CASES = {
    "euler_exact": Case("Euler, the paper's D, two passes over the fakes"),
    "euler_fused": Case("Euler, the paper's D, one pass over the fakes", FUSED),
    "euler_light": Case("Euler, the light D, the quickstart's", LIGHT),
    "heun_exact": Case("Heun, the paper's D", HEUN),
    "euler_naive": Case("Euler, the denoiser evaluated again for the projection and for D, R1 at every step",
                        {"r1_every": 1}, naive=True),
    "euler_light_fused": Case("Euler, the light D, one pass over the fakes", LIGHT | FUSED),
    "heun_fused": Case("Heun, the paper's D, one pass over the fakes", HEUN | FUSED),
    "euler_r1": Case("Euler, the paper's D, R1 at every step", {"r1_every": 1}),
    "euler_narrow": Case(f"Euler, the paper's D at width {NARROW_WIDTH:g}", {"d_width": NARROW_WIDTH}),
    "euler_half": Case("Euler, D of half the paper's width", {"d_width": 0.5}),
    "euler_bf16": Case("Euler, the paper's D in bfloat16", {"d_precision": "bf16"}),
}  # fmt: skip
DEFAULT = list(CASES)[:8]
