"""Observation-guided diffusion (OGDM): the method, once.

config         OGDMConfig: every setting, and every backbone's flags made from it
schedule       x_t = a_t x_0 + b_t eps: DiscreteVP (ADM, LDM, diffusers), KarrasVE (EDM)
lookahead      s ~ U(1, min(t, floor(k T)))
solvers        Phi(x_t, t, s; theta): the step that projects and samples
samplers       Euler, Heun, S-PNDM, F-PNDM, stochastic
discriminator  D_phi(x, t, s[, label]), and light, a small one
losses         L_emission, L_D, R1
observer       Observer: owns D and takes turns with a trainer
"""

from .config import OGDMConfig
from .discriminator import Discriminator
from .light import LightDiscriminator
from .lookahead import sample_lookahead
from .observer import Observer
from .samplers import DISCRETISATIONS, SAMPLERS, sample, steps_for_nfe
from .schedule import DiscreteVP, KarrasVE, Schedule
from .solvers import project, step

__version__ = "0.1.0"

__all__ = [
    "DISCRETISATIONS",
    "SAMPLERS",
    "DiscreteVP",
    "Discriminator",
    "KarrasVE",
    "LightDiscriminator",
    "OGDMConfig",
    "Observer",
    "Schedule",
    "project",
    "sample",
    "sample_lookahead",
    "step",
    "steps_for_nfe",
]
