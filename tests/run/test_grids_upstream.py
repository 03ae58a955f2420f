"""The times of `linear` and `quadratic` against those of the codebases that the paper used."""

import json
import subprocess
import sys

import pytest

from ogdm_core import DiscreteVP

STEPS = (5, 10, 20, 25, 50)


def ask(folder, expression, imports):
    """A Python expression's value in an upstream's folder, with our shims for LDM's imports."""
    script = f"import json; {imports}; print(json.dumps({expression}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_linear_times_are_guided_diffusions_ddim_steps(pristine):
    respaced = f"[sorted(space_timesteps(1000, f'ddim{{n}}')) for n in {STEPS}]"
    imports = "from guided_diffusion.respace import space_timesteps"
    for steps, indices in zip(STEPS, ask(pristine("guided-diffusion"), respaced, imports), strict=True):
        assert DiscreteVP.linear().times(steps)[-2::-1] == [i + 1 for i in indices]


@pytest.mark.parametrize(("ours", "theirs"), [("linear", "uniform"), ("quadratic", "quad")])
def test_times_are_latent_diffusions_ddim_steps(pristine, ours, theirs):
    """Its numbers are ours. It uses them as indices counted from 0, so it is one step noisier."""
    made = f"[make_ddim_timesteps('{theirs}', n, 1000, False).tolist() for n in {STEPS[:-1]}]"
    imports = (
        "import ogdm_core.ldm.compat; ogdm_core.ldm.compat.install(); "
        "from ldm.modules.diffusionmodules.util import make_ddim_timesteps"
    )
    for steps, numbers in zip(STEPS, ask(pristine("latent-diffusion"), made, imports), strict=False):
        assert DiscreteVP.linear().times(steps, ours)[-2::-1] == numbers
