"""Settings <-> command lines. Every backbone's flags are made here from `OGDMConfig`.

ADM, diffusers, SiT   add_arguments(parser)       --ogdm True --ogdm_k 0.2, --ogdm --ogdm-k 0.2
EDM, EDM2             click_options(command)      --ogdm --ogdm-k=0.2
LDM                   OGDMConfig.from_mapping     model.params.ogdm.k: 0.2
"""

import argparse
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from functools import partial
from typing import Any

from .cli import typed
from .config import RECIPES, OGDMConfig, check, parse_bool

PREFIX = "ogdm"
SWITCH_HELP = "train with observation guidance"
RECIPE_HELP = "defaults of the other settings: ours, or the paper's and its released code's (default: {})"
RECIPE_NAMES = (*RECIPES, "ours")  # the old name of "default"


def from_args(
    args: argparse.Namespace | Mapping[str, Any], backbone: str = "", defaults: Mapping[str, Any] | None = None
) -> OGDMConfig | None:
    """The settings from parsed flags (`ogdm`, `ogdm_k`, ...); None when `--ogdm` is off.

    Settings that no flag gives have the values of `--ogdm-recipe` for this backbone; without that flag
    they have `defaults`, the command's own, where it has some. A command without `--ogdm` is always on.
    """
    values = args if isinstance(args, Mapping) else vars(args)
    names = ["recipe", *(f.name for f in fields(OGDMConfig))]
    given = {name: values.get(f"{PREFIX}_{name}") for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if not values.get(PREFIX, True):
        if given:
            words = ", ".join(f"--{PREFIX}-{name.replace('_', '-')}" for name in given)
            warnings.warn(f"{words}: no effect without --{PREFIX}", stacklevel=2)
        return None
    own = {} if "recipe" in given else defaults or {}
    return OGDMConfig.from_mapping({**own, **given}, backbone)


def add_arguments(
    parser: argparse.ArgumentParser,
    backbone: str = "",
    defaults: Mapping[str, Any] | None = None,
    switch: bool = True,
    without: Collection[str] = (),
) -> None:
    """Adds one flag per setting, and `--ogdm` unless `switch` is off; dashes and underscores both work.

    The help prints the values that hold: `defaults` for this command, else the backbone's. Settings in `without`
    have no effect in this command, and no flag.
    """
    plain = OGDMConfig.from_mapping(defaults or {}, backbone)
    group = parser.add_argument_group("observation guidance (OGDM)")
    if switch:
        kind = typed(parse_bool)
        group.add_argument(
            f"--{PREFIX}", nargs="?", const=True, default=False, type=kind, metavar="BOOL", help=SWITCH_HELP
        )
    usual = RECIPE_HELP.format("the values below" if defaults else "default")
    names = [f"--{PREFIX}-recipe", f"--{PREFIX}_recipe"]
    group.add_argument(*names, choices=RECIPE_NAMES, metavar="|".join(RECIPES), help=usual)
    for f in (f for f in fields(OGDMConfig) if f.name not in without):
        optional: dict[str, Any] = {"nargs": "?", "const": True} if isinstance(f.default, bool) else {}
        group.add_argument(*_names(f), type=typed(partial(check, f)), **_help_of(f, plain), **optional)


def whole_numbers(text: str) -> list[int]:
    """The type of a click option, 16,8; an empty text has none."""
    import click

    try:
        return [int(number) for number in text.split(",") if number]
    except ValueError as error:
        raise click.BadParameter(f"{text} is no list of whole numbers; give one as in 16,8") from error


def click_options(command: Callable) -> Callable:
    """The same flags as a click decorator: `--ogdm`, `--ogdm-k`, ..."""
    import click

    switch: dict[str, Any] = {"is_flag": False, "flag_value": True}  # the value may be left out
    for f in reversed(fields(OGDMConfig)):
        optional = switch if isinstance(f.default, bool) else {}
        words, kind = _help_of(f, OGDMConfig()), typed(partial(check, f), click.BadParameter)
        command = click.option(*_names(f), type=kind, **words, **optional)(command)
    names, known = [f"--{PREFIX}-recipe", f"--{PREFIX}_recipe"], click.Choice(RECIPE_NAMES)
    usual = RECIPE_HELP.format("default")
    command = click.option(*names, type=known, metavar="|".join(RECIPES), help=usual)(command)
    return click.option(f"--{PREFIX}", default=False, type=click.BOOL, metavar="BOOL", help=SWITCH_HELP, **switch)(
        command
    )


def _names(f: Field) -> list[str]:
    """The flag with dashes, which gives the destination, and with underscores."""
    return [f"--{PREFIX}-{f.name.replace('_', '-')}", f"--{PREFIX}_{f.name}"]


def _help_of(f: Field, plain: OGDMConfig) -> dict[str, Any]:
    """A flag's metavar and help text, for argparse and click alike."""
    value = getattr(plain, f.name)
    return {
        "metavar": "|".join(f.metadata["choices"]) or type(0.0 if f.default is None else f.default).__name__.upper(),
        "help": f"{f.metadata['help']} (default: {'none, rho gives it' if value is None else value})",
    }
