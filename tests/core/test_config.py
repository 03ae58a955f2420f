import argparse
import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from ogdm_core import OGDMConfig, flags

NAMES = [f.name for f in fields(OGDMConfig)]
DEFAULT = OGDMConfig()
# One legal value for every setting, none of them the default, as text and as the config holds it.
OTHER = {
    "projection": ("heun", "heun"),
    "k": ("0.35", 0.35),
    "rho": ("7", 7.0),
    "plain_end": ("0.5", 0.5),
    "gamma": ("0.5", 0.5),
    "adversarial": ("hinge", "hinge"),
    "r1": ("0.25", 0.25),
    "r1_every": ("4", 4),
    "d_kind": ("light", "light"),
    "d_width": ("0.5", 0.5),
    "d_lr": ("2e-4", 2e-4),
    "d_mapping_lr": ("0.01", 0.01),
    "d_precision": ("bf16", "bf16"),
    "fused": ("True", True),
    "augment_labels": ("drop", "drop"),
    "seed": ("12345678901234567", 12345678901234567),  # past the last whole number of a float
}
BAD = [
    ("projection", "midpoint", "euler or heun"),
    ("k", -0.1, r"\[0, 1\]"),
    ("k", 1.5, r"\[0, 1\]"),
    ("k", float("nan"), r"\[0, 1\]"),
    ("k", "a lot", r"\[0, 1\]"),
    ("k", True, r"\[0, 1\]"),
    ("gamma", -1.0, ">= 0"),
    ("gamma", float("inf"), ">= 0"),
    ("rho", None, ">= 0"),
    ("rho", -1, ">= 0"),
    ("plain_end", 1.0, r"\[0.0, 0.99\]"),
    ("adversarial", "wasserstein", "nonsaturating or hinge"),
    ("r1", -1e-9, ">= 0"),
    ("r1_every", 0, "whole number >= 1"),
    ("r1_every", 2.5, "whole number >= 1"),
    ("d_kind", "heavy", "paper or light or auto"),
    ("d_width", 0.0, "> 0"),
    ("d_lr", 0.0, "> 0"),
    ("d_precision", "fp16", "fp32 or bf16"),
    ("fused", "perhaps", "true or false"),
    ("seed", -1, r"whole number in \[0, 9223372036854775807\]"),
    ("seed", 2**63, r"whole number in \[0, 9223372036854775807\]"),
]


def flag(name):
    return "--ogdm-" + name.replace("_", "-")


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    return parser


@pytest.fixture
def click_main():
    click = pytest.importorskip("click")

    @click.command()
    @flags.click_options
    def main(**kwargs):
        main.seen = kwargs

    return main


@pytest.fixture(params=["argparse", "click"])  # diffusers' and ADM's style, EDM's style
def parse(request, capsys):
    """parse(words...) gives the flags as a mapping, or the text that refuses them."""
    if request.param == "argparse":
        parser = request.getfixturevalue("parser")

        def run(*argv):
            try:
                return vars(parser.parse_args(argv))
            except SystemExit:
                return capsys.readouterr().err

        return run
    from click.testing import CliRunner

    main = request.getfixturevalue("click_main")

    def run(*argv):
        result = CliRunner().invoke(main, list(argv))
        return main.seen if result.exit_code == 0 else " ".join(result.output.split())

    return run


# ---------------------------------------------------------------- values


def test_the_table_of_other_values_covers_every_setting():
    assert list(OTHER) == NAMES
    assert all(getattr(DEFAULT, name) != value for name, (_, value) in OTHER.items())


def test_without_a_fixed_gamma_rho_gives_the_weight():
    assert (DEFAULT.projection, DEFAULT.adversarial) == ("euler", "nonsaturating")
    assert DEFAULT.gamma is None and DEFAULT.rho > 0 < DEFAULT.plain_end


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_bad_values_name_the_setting_the_value_and_the_range(name, value, allowed):
    with pytest.raises(ValueError, match=f"setting {name}: .*is not allowed.*{allowed}") as error:
        OGDMConfig(**{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("k", 0), ("k", 1), ("gamma", 0), ("r1", 0)])
def test_the_ends_of_a_range_belong_to_it(name, value):
    assert getattr(OGDMConfig(**{name: value}), name) == value


def test_values_are_stored_in_the_fields_own_type():
    config = OGDMConfig(k="0.5", r1_every=4.0, fused="yes", gamma=1)
    assert (config.k, config.r1_every, config.fused) == (0.5, 4, True)
    assert type(config.r1_every) is int and type(config.gamma) is float
    with pytest.raises(FrozenInstanceError):
        config.k = 0.1


def test_to_dict_survives_json_and_comes_back():
    config = OGDMConfig(**{name: value for name, (_, value) in OTHER.items()})
    assert OGDMConfig.from_mapping(json.loads(json.dumps(config.to_dict()))) == config


# ---------------------------------------------------------------- flags, in both styles


@pytest.mark.parametrize("argv", [[], ["--ogdm=0"], ["--ogdm=False"], ["--ogdm=no"]])
def test_off_by_default(parse, argv):
    assert flags.from_args(parse(*argv)) is None


def test_flags_without_the_switch_are_named(parse):
    with pytest.warns(UserWarning, match="--ogdm-k: no effect without --ogdm"):
        assert flags.from_args(parse("--ogdm", "false", "--ogdm-k", "0.3")) is None


@pytest.mark.parametrize("argv", [["--ogdm"], ["--ogdm", "True"], ["--ogdm=1"], ["--ogdm", "on"]])
def test_the_switch_gives_the_dataclass(parse, argv):
    assert flags.from_args(parse(*argv)) == DEFAULT


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spelling", ["dashes", "underscores"])
def test_every_setting_is_taken(parse, name, spelling):
    text, value = OTHER[name]
    given = flag(name) if spelling == "dashes" else f"--ogdm_{name}"
    assert flags.from_args(parse("--ogdm", given, text)) == OGDMConfig(**{name: value}) != DEFAULT


def test_a_switch_before_another_flag_swallows_nothing(parse):
    config = flags.from_args(parse("--ogdm", "--ogdm-fused", "--ogdm-k", "0.3"))
    assert config == OGDMConfig(fused=True, k=0.3)


@pytest.mark.parametrize(("name", "value", "allowed"), [b for b in BAD if b[1] is not True])
def test_bad_values_are_refused_at_once(parse, name, value, allowed):
    message = parse(f"{flag(name)}={value}")
    assert flag(name) in message and repr(str(value)) in message
    assert allowed.replace("\\", "") in message


def test_a_bad_switch_is_explained(parse):
    message = parse("--ogdm=perhaps")
    assert all(part in message for part in ("--ogdm", "'perhaps'"))


def test_parsed_flags_may_be_a_dict_with_other_flags_in_it():
    assert flags.from_args({"ogdm": True, "ogdm_k": 0.3, "lr": 1}) == OGDMConfig(k=0.3)
    assert flags.from_args({"ogdm": False, "lr": 1}) is None
    assert flags.from_args({}) == DEFAULT, "a command without --ogdm is always on"


# ---------------------------------------------------------------- all styles are one


def test_names_help_and_defaults_are_the_same_everywhere(parser, click_main):
    actions = {a.dest: a for a in parser._actions if a.dest.startswith("ogdm")}
    options = {o.name: o for o in click_main.params}
    names = ["ogdm", "ogdm_recipe", *(f"ogdm_{name}" for name in NAMES)]
    assert list(actions) == list(options) == names
    for dest in actions:
        assert actions[dest].help == options[dest].help
        assert actions[dest].metavar == options[dest].metavar
        assert set(actions[dest].option_strings) == set(options[dest].opts)
    for f in fields(OGDMConfig):
        shown = "none, rho gives it" if f.default is None else f.default
        assert f"(default: {shown})" in actions[f"ogdm_{f.name}"].help


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize(("backbone", "r1", "d_lr"), [("adm", 0.25, 1e-4), ("edm", 1.0, 1e-3)])
def test_the_release_recipe_sets_defaults_and_every_flag_wins(parse, backbone, r1, d_lr):
    release = OGDMConfig(k=0.2, gamma=0.025, adversarial="hinge", r1=r1, r1_every=1, d_lr=d_lr, d_mapping_lr=0.01,
                         d_kind="paper", augment_labels="drop" if backbone == "edm" else "keep")  # fmt: skip
    argv = ["--ogdm", "--ogdm-recipe", "release"]
    assert flags.from_args(parse(*argv), backbone) == release
    won = flags.from_args(parse(*argv, "--ogdm-r1", "0.01", "--ogdm-r1-every", "16"), backbone)
    assert won == replace(release, r1=0.01, r1_every=16)
    for name in ("default", "ours"):  # its old name
        assert flags.from_args(parse("--ogdm", "--ogdm-recipe", name), backbone) == DEFAULT
    mapping = {"recipe": "release", "adversarial": "nonsaturating"}
    expected = replace(release, adversarial="nonsaturating")
    assert OGDMConfig.from_mapping(mapping, backbone) == expected


def test_the_trainer_for_diffusers_models_has_defaults_of_its_own(parser):
    for argv in (["--ogdm"], ["--ogdm", "--ogdm-recipe", "default"]):
        plain = flags.from_args(parser.parse_args(argv), "diffusers")
        assert plain == replace(DEFAULT, fused=True)
    shown = argparse.ArgumentParser()
    flags.add_arguments(shown, "diffusers")
    assert "updates (default: True)" in " ".join(shown.format_help().split())


def test_an_unknown_recipe_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown recipe 'theirs'; .* default, release"):
        OGDMConfig.from_mapping({"recipe": "theirs"})


# ---------------------------------------------------------------- OmegaConf (LDM's style)


def test_omegaconf_node():
    omegaconf = pytest.importorskip("omegaconf")
    yaml = "{width: 0.5, ogdm: {k: 0.1, d_betas: [0.9, 0.999], d_width: '${width}', fused: true}}"
    node = omegaconf.OmegaConf.create(yaml)
    expected = OGDMConfig(k=0.1, d_width=0.5, fused=True)
    assert OGDMConfig.from_mapping(node.ogdm) == expected, "d_betas was a setting; its default may stand in a file"
    back = omegaconf.OmegaConf.create({"ogdm": expected.to_dict()})
    assert OGDMConfig.from_mapping(back.ogdm) == expected


@pytest.mark.parametrize(("name", "value"), [("gama", 0.1), ("d_betas", [0.5, 0.9])])
def test_unknown_settings_are_refused_with_the_known_ones(name, value):
    with pytest.raises(ValueError, match=f"unknown OGDM setting '{name}'.*gamma"):
        OGDMConfig.from_mapping({name: value})
