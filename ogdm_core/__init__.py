"""Observation-guided diffusion (OGDM): the method, once.

config         OGDMConfig: every setting, with its range; flags: every backbone's flags made from it
schedule       x_t = a_t x_0 + b_t eps, and s: DiscreteVP, KarrasVE, RectifiedFlow
solvers        Phi(x_t, t, s; theta): the step that projects and samples
samplers       Euler, Heun, S-PNDM, F-PNDM, DPM-Solver++, UniPC, stochastic; nfe: what they cost
discriminator  D_phi(x, t, s[, label]): the paper's, and a light one
losses         L_emission, L_D, R1
guidance       discriminator guidance while sampling, which the paper compares with
observer       Observer: owns D, adds the emission term, updates D
checkpoints    files that are damaged, foreign or programs; a run that diverged
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import OGDMConfig as OGDMConfig
    from .discriminator import Discriminator as Discriminator
    from .discriminator import LightDiscriminator as LightDiscriminator
    from .nfe import DISCRETISATIONS as DISCRETISATIONS
    from .nfe import SAMPLERS as SAMPLERS
    from .nfe import steps_for_nfe as steps_for_nfe
    from .observer import Observer as Observer
    from .observer import training_loss as training_loss
    from .samplers import sample as sample
    from .schedule import DiscreteVP as DiscreteVP
    from .schedule import KarrasVE as KarrasVE
    from .schedule import RectifiedFlow as RectifiedFlow
    from .schedule import Schedule as Schedule
    from .solvers import project as project
    from .solvers import step as step

__version__ = "0.2.0"

# Imported on first use: config, flags, nfe and files need no torch, so that a command can refuse a
# wrong flag before it is imported, or even installed.
_HOMES = {
    "config": ("OGDMConfig",),
    "discriminator": ("Discriminator", "LightDiscriminator"),
    "observer": ("Observer", "training_loss"),
    "nfe": ("DISCRETISATIONS", "SAMPLERS", "steps_for_nfe"),
    "samplers": ("sample",),
    "schedule": ("DiscreteVP", "KarrasVE", "RectifiedFlow", "Schedule"),
    "solvers": ("project", "step"),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
