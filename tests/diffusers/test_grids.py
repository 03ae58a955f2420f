"""docs/diffusers.md: which time grid of ours is which of diffusers'."""

import pytest

from ogdm_core import DiscreteVP, KarrasVE

diffusers = pytest.importorskip("diffusers")
MULTISTEP = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")


def times(name, steps, **options):
    """diffusers' times, counted from 1 as ours."""
    scheduler = getattr(diffusers, name)(**options)
    scheduler.set_timesteps(steps)
    return [int(t) + 1 for t in scheduler.timesteps]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 10, 25])
def test_grids_are_diffusers_by_the_names_in_the_docs(steps):
    ours = {name: DiscreteVP.linear().times(steps, name)[:-1] for name in ("linear", "trailing", "karras")}
    assert times("DDIMScheduler", steps) == times("DDIMScheduler", steps, timestep_spacing="leading") == ours["linear"]
    for name in ("DDIMScheduler", *MULTISTEP):
        assert times(name, steps, timestep_spacing="trailing") == ours["trailing"]
    for name in MULTISTEP:
        assert times(name, steps, use_karras_sigmas=True) == ours["karras"]
        assert times(name, steps, timestep_spacing="leading") not in ours.values()
        assert max(abs(a - b) for a, b in zip(times(name, steps), ours["trailing"], strict=True)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"])
def test_edms_schedulers_have_karras_levels(name):
    scheduler = getattr(diffusers, name)()
    scheduler.set_timesteps(10)
    assert scheduler.sigmas.tolist() == pytest.approx(KarrasVE().times(10), rel=1e-5)
