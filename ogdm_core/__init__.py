"""Observation-guided diffusion (OGDM): the method, once.

config         OGDMConfig: every setting, with its range; flags: every backbone's flags made from it
schedule       x_t = a_t x_0 + b_t eps, and s: DiscreteVP, KarrasVE, RectifiedFlow, GVP
solvers        Phi(x_t, t, s; theta): the step that projects and samples
samplers       Euler, Heun, PNDM, iPNDM, DEIS, DPM-Solver, UniPC, stochastic; nfe: what they cost; grids: time grids
discriminator  D_phi(x, t, s[, label]): the paper's, and a light one
losses         L_emission, L_D, R1
guidance       discriminator guidance while sampling, which the paper compares with
observer       Observer: owns D, adds the emission term, updates D
checkpoints    damaged files and runs that diverged; sealed: complete ones; trust, unpickle: files that are programs
adm, edm, ldm, edm2, sit   one folder for each native trainer; diffusers: our own trainer for diffusers' models
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.3.0"

# The public names stand once, in __init__.pyi, which type checkers read. Each is imported when it is first used, so
# that commands which need no torch (config, flags, cli, nfe, files) start at once, also where it is not installed.
_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
