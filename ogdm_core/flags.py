"""Settings <-> command lines. Every backbone's flags are made here from `OGDMConfig`.

ADM, diffusers, SiT   add_arguments(parser)       --ogdm True --ogdm_k 0.2, --ogdm --ogdm-k 0.2
EDM, EDM2             click_options(command)      --ogdm --ogdm-k=0.2
LDM                   OGDMConfig.from_mapping     model.params.ogdm.k: 0.2
"""

import argparse
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from .cli import typed
from .config import RECIPES, OGDMConfig, check, parse_bool, recipe

PREFIX = "ogdm"
SWITCH_HELP = "train with observation guidance"
RECIPE_HELP = "defaults of the other settings: ours, or the paper's and its released code's (default: {})"


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
    for name, parse, is_bool, words in _flags(plain, "the values below" if defaults else "default"):
        optional: dict[str, Any] = {"nargs": "?", "const": True} if is_bool else {}
        if name not in without and (name or switch):
            group.add_argument(*_spellings(name), type=typed(parse), **words, **optional)


def click_options(command: Callable) -> Callable:
    """The same flags as a click decorator: `--ogdm`, `--ogdm-k`, ..."""
    import click

    for name, parse, is_bool, words in reversed([*_flags(OGDMConfig(), "default")]):
        optional: dict[str, Any] = {"is_flag": False, "flag_value": True} if is_bool else {}  # may be left out
        command = click.option(*_spellings(name), type=typed(parse, click.BadParameter), **words, **optional)(command)
    return command


def _flags(plain: OGDMConfig, usual: str) -> Iterator[tuple[str, Callable[[Any], Any], bool, dict[str, Any]]]:
    """Of each flag the name, "" for the switch; what reads it; whether it is true or false; what argparse and click
    are told alike. Its help prints the value in `plain`, for a recipe `usual`."""
    yield "", parse_bool, True, {"default": False, "metavar": "BOOL", "help": SWITCH_HELP}
    yield "recipe", _known_recipe, False, {"metavar": "|".join(RECIPES), "help": RECIPE_HELP.format(usual)}
    for f in fields(OGDMConfig):
        value, kind = getattr(plain, f.name), type(0.0 if f.default is None else f.default).__name__.upper()
        words = f"{f.metadata['help']} (default: {'none, rho gives it' if value is None else value})"
        metavar = "|".join(f.metadata["choices"]) or kind
        yield f.name, partial(check, f), isinstance(f.default, bool), {"metavar": metavar, "help": words}


def _spellings(name: str) -> list[str]:
    """The flag with dashes, which gives the destination, and with underscores."""
    return [f"--{PREFIX}-{name.replace('_', '-')}", f"--{PREFIX}_{name}"] if name else [f"--{PREFIX}"]


def _known_recipe(name: str) -> str:
    recipe(name)  # refuses others
    return name


def whole_numbers(text: str) -> list[int]:
    """The type of a click option, 16,8; an empty text has none."""
    import click

    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise click.BadParameter(f"{text} is no list of whole numbers; give one as in 16,8")
    return [int(number) for number in text.split(",") if number]
