"""Observation-guided diffusion (OGDM): the method, once.

config         OGDMConfig: every setting, with its range; flags: every backbone's flags made from it
schedule       x_t = a_t x_0 + b_t eps, and s: DiscreteVP, KarrasVE, RectifiedFlow
solvers        Phi(x_t, t, s; theta): the step that projects and samples
samplers       Euler, Heun, S-PNDM, F-PNDM, DPM-Solver++, UniPC, stochastic; nfe: what they cost
discriminator  D_phi(x, t, s[, label]): the paper's, and a light one
losses         L_emission, L_D, R1
guidance       discriminator guidance while sampling, which the paper compares with
observer       Observer: owns D, adds the emission term, updates D
checkpoints    damaged files and runs that diverged; sealed: complete ones; trust: files that are programs
adm, edm, ldm  one folder for each native trainer; diffusers: our own trainer for diffusers' models
"""

from importlib.util import find_spec

from .config import OGDMConfig as OGDMConfig
from .nfe import DISCRETISATIONS as DISCRETISATIONS
from .nfe import SAMPLERS as SAMPLERS
from .nfe import steps_for_nfe as steps_for_nfe

if find_spec("torch"):  # a bare clone has config, flags, cli and nfe, so that commands can check their flags
    from .discriminator import Discriminator as Discriminator
    from .discriminator import LightDiscriminator as LightDiscriminator
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
