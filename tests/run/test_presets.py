import re

import pytest

from ogdm_core import DISCRETISATIONS, SAMPLERS
from run.backbones import NAMES
from run.presets import DISCRETISATION, PRESETS, get_preset

# Table 5, as printed: dataset, backbone, training, projection, k, gamma, batch, images in millions.
TABLE_5 = """
cifar10      adm  baseline  -      -    -      128  38
cifar10      adm  scratch   euler  0.1  0.01   128  38
cifar10      adm  finetune  euler  0.2  0.025  128  2
cifar10      edm  baseline  -      -    -      512  200
cifar10      edm  finetune  euler  0.2  0.025  512  20
cifar10      edm  finetune  heun   0.2  0.005  512  20
celeba64     adm  baseline  -      -    -      128  38
celeba64     adm  scratch   euler  0.1  0.01   128  38
celeba64     adm  finetune  euler  0.2  0.025  128  2
lsun-church  ldm  baseline  -      -    -      96   48
lsun-church  ldm  finetune  euler  0.1  0.01   96   1.5
"""
# Table 6; "default of Karras et al." is their spacing.
TABLE_6 = """
cifar10      adm  euler   quadratic
cifar10      adm  s-pndm  linear
cifar10      adm  f-pndm  linear
cifar10      edm  euler   karras
cifar10      edm  heun    karras
cifar10      edm  s-pndm  karras
celeba64     adm  euler   linear
celeba64     adm  s-pndm  linear
celeba64     adm  f-pndm  linear
lsun-church  ldm  euler   linear
lsun-church  ldm  s-pndm  quadratic
lsun-church  ldm  f-pndm  quadratic
"""


def rows(table):
    return [line.split() for line in table.strip().splitlines()]


def printed(preset):
    images = preset.images / 1e6
    images = round(images) if images > 1.6 else images
    cells = [preset.projection or "-", "-" if preset.k is None else f"{preset.k:g}",
             "-" if preset.gamma is None else f"{preset.gamma:g}"]  # fmt: skip
    return [preset.dataset, preset.backbone, preset.training, *cells, str(preset.batch),
            f"{images:g}"]  # fmt: skip


def test_presets_are_table_5():
    unconditional = [printed(p) for p in PRESETS.values() if not p.conditional]
    assert unconditional == rows(TABLE_5)


def test_class_conditional_edm_is_trained_like_the_unconditional():
    # Tables 1 and 3 have it; Table 5 lists no settings of its own for it.
    conditional = [p for p in PRESETS.values() if p.conditional]
    assert [printed(p) for p in conditional] == [row for row in rows(TABLE_5) if row[1] == "edm" and row[3] != "heun"]


def test_discretisations_are_table_6():
    ours = [
        [*place.rsplit("-", 1), sampler, discretisation]
        for place, samplers in DISCRETISATION.items()
        for sampler, discretisation in samplers.items()
    ]
    assert ours == rows(TABLE_6)
    assert all(row[2] in SAMPLERS and row[3] in DISCRETISATIONS for row in ours)


def test_every_preset_can_be_sampled():
    assert {f"{p.dataset}-{p.backbone}" for p in PRESETS.values()} == set(DISCRETISATION)


def test_names_are_unique_and_say_what_they_are():
    for name, preset in PRESETS.items():
        assert name == preset.name
        assert re.fullmatch(r"[a-z0-9-]+", name)
        assert preset.dataset in name and preset.backbone in NAMES
        assert ("ogdm" in name) == preset.ogdm == (preset.training != "baseline")
        assert ("-ft" in name) == (preset.training == "finetune")


def test_a_fine_tune_starts_from_the_baseline_beside_it():
    for preset in PRESETS.values():
        assert (preset.baseline is not None) == (preset.training == "finetune")
        if preset.baseline:
            base = PRESETS[preset.baseline]
            assert (base.dataset, base.backbone, base.conditional, base.training) == (
                preset.dataset, preset.backbone, preset.conditional, "baseline")  # fmt: skip


def test_lookup_lists_what_there_is():
    assert get_preset("cifar10-edm-ogdm-ft").projection == "euler"
    with pytest.raises(ValueError, match="unknown preset 'imagenet'.*cifar10-adm-ogdm, "):
        get_preset("imagenet")
