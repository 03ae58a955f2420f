from .config import OGDMConfig as OGDMConfig
from .discriminator import Discriminator as Discriminator
from .discriminator import LightDiscriminator as LightDiscriminator
from .nfe import DISCRETISATIONS as DISCRETISATIONS
from .nfe import SAMPLERS as SAMPLERS
from .nfe import steps_for_nfe as steps_for_nfe
from .observer import Observer as Observer
from .observer import training_loss as training_loss
from .samplers import sample as sample
from .schedule import GVP as GVP
from .schedule import DiscreteVP as DiscreteVP
from .schedule import KarrasVE as KarrasVE
from .schedule import RectifiedFlow as RectifiedFlow
from .schedule import Schedule as Schedule
from .solvers import project as project
from .solvers import step as step

__version__: str
