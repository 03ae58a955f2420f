"""Every place where upstream's code, taming's or ours may run what a file says, and how it is guarded."""

import ast
import importlib.util
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = {"exec", "eval", "torch.load", "th.load", "torch.jit.load", "pickle.load", "pickle.loads", "pickle.Unpickler"}
BUILDERS = {"instantiate_from_config", "get_obj_from_str"}

SCRIPT = "upstream's script, not patched, as docs/reliability.md says"
LOAD = "compat.install replaces torch.load"
BUILD = "compat.install replaces get_obj_from_str, by which it looks up targets, and instantiate_from_config"
PATCHED = "the patch rebinds pickle to compat.careful_pickle"
GUARDED = {
    "guided-diffusion": {
        "guided_diffusion/dist_util.py: th.load": "the patch rebinds load_state_dict to compat's",
    },
    "edm": {
        "training/training_loop.py: pickle.load": PATCHED,
        "training/training_loop.py: torch.load": LOAD,
        "generate.py: pickle.load": PATCHED,
        "torch_utils/persistence.py: exec": "compat never calls the function that leads there",
        "fid.py: pickle.load": SCRIPT,
        "dataset_tool.py: pickle.load": SCRIPT,
        "example.py: pickle.load": SCRIPT,
    },
    "latent-diffusion": {
        "main.py: instantiate_from_config": BUILD,
        "ldm/util.py: get_obj_from_str": BUILD,
        "ldm/models/autoencoder.py: instantiate_from_config": BUILD,
        "ldm/models/autoencoder.py: torch.load": LOAD,
        "ldm/models/diffusion/classifier.py: instantiate_from_config": BUILD,
        "ldm/models/diffusion/classifier.py: torch.load": LOAD,
        "ldm/models/diffusion/ddpm.py: instantiate_from_config": BUILD,
        "ldm/models/diffusion/ddpm.py: torch.load": LOAD,
        "ldm/modules/diffusionmodules/model.py: instantiate_from_config": BUILD,
        "ldm/modules/diffusionmodules/util.py: instantiate_from_config": BUILD,
        "ldm/data/imagenet.py: pickle.load": "a file of upstream's own repository, at a fixed path",
        "scripts/sample_diffusion.py: instantiate_from_config": BUILD,
        "scripts/sample_diffusion.py: torch.load": LOAD,
        **{f"scripts/{name}.py: {call}": SCRIPT for name in ("txt2img", "knn2img", "inpaint")
           for call in ("instantiate_from_config", "torch.load")},
        "notebook_helpers.py: instantiate_from_config": SCRIPT,
        "notebook_helpers.py: torch.load": SCRIPT,
    },
    "taming": {
        "main.py: get_obj_from_str": BUILD,
        "main.py: instantiate_from_config": BUILD,
        "models/vqgan.py: instantiate_from_config": BUILD,
        "models/vqgan.py: torch.load": LOAD,
        "models/cond_transformer.py: instantiate_from_config": BUILD,
        "models/cond_transformer.py: torch.load": LOAD,
        "modules/losses/lpips.py: torch.load": LOAD,
    },
    "ogdm_core": {
        "trust.py: torch.load": "the gate itself",
        "dnnlib.py: pickle.load": "with --trust only",
        "ldm/sample.py: instantiate_from_config": BUILD,
    },
    "run": {
        "backbones/base.py: pickle.load": "pickle is compat.careful_pickle",
        "backbones/edm.py: pickle.load": "pickle is compat.careful_pickle",
    },
}  # fmt: skip
for doors in sorted(ROOT.glob("tests/*/doors.py")):  # of backbones that came later
    for tree, entries in runpy.run_path(str(doors))["GUARDED"].items():
        GUARDED.setdefault(tree, {}).update(entries)
UPSTREAMS = [tree for tree in GUARDED if tree not in ("taming", "ogdm_core", "run")]


def places(folder: Path) -> set[str]:
    """The calls of RUN and, by any module's name, of BUILDERS below a folder, as "FILE: CALL"."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            found |= {
                f"{path.relative_to(folder)}: {call}" for call in {name} & RUN | {name.rsplit(".")[-1]} & BUILDERS
            }
    return found


def _folder(tree: str) -> Path:
    if tree == "taming":
        spec = importlib.util.find_spec("taming")
        if spec is None:
            pytest.skip("taming is not installed; run/setup.sh installs it")
        return Path(next(iter(spec.submodule_search_locations)))
    return ROOT / tree


@pytest.mark.parametrize("tree", ["taming", "ogdm_core", "run"])
def test_every_place_that_may_run_a_file_is_guarded(tree):
    assert places(_folder(tree)) == set(GUARDED[tree])


@pytest.mark.parametrize("tree", UPSTREAMS)
def test_every_place_of_upstreams_that_may_run_a_file_is_guarded(patched, tree):
    folder = patched(tree)
    assert places(folder) == set(GUARDED[tree])
    for place, how in GUARDED[tree].items():
        assert how != PATCHED or "careful_pickle as pickle" in (folder / place.partition(":")[0]).read_text()
