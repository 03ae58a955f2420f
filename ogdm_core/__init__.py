"""Observation-guided diffusion (OGDM): the method, once.

config         OGDMConfig: every setting, with its range; flags: every backbone's flags made from it
schedule       x_t = a_t x_0 + b_t eps, and s: DiscreteVP, KarrasVE, RectifiedFlow
solvers        Phi(x_t, t, s; theta): the step that projects and samples
samplers       Euler, Heun, S-PNDM, F-PNDM, stochastic
discriminator  D_phi(x, t, s[, label]): the paper's, and a light one
losses         L_emission, L_D, R1
observer       Observer: owns D, adds the emission term, updates D
"""

from .config import OGDMConfig
from .discriminator import Discriminator, LightDiscriminator
from .observer import Observer, training_loss
from .samplers import SAMPLERS, sample, steps_for_nfe
from .schedule import DISCRETISATIONS, DiscreteVP, KarrasVE, RectifiedFlow, Schedule
from .solvers import project, step

__version__ = "0.2.0"

__all__ = [
    "DISCRETISATIONS",
    "SAMPLERS",
    "DiscreteVP",
    "Discriminator",
    "KarrasVE",
    "LightDiscriminator",
    "OGDMConfig",
    "Observer",
    "RectifiedFlow",
    "Schedule",
    "project",
    "sample",
    "step",
    "steps_for_nfe",
    "training_loss",
]
