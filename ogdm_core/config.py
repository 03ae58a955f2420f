"""The settings of the method, once.

`OGDMConfig` is the single place where a setting has a name, a type, a default, a range and a help
text. Every backbone's flags are generated from it, so they cannot drift apart:

    ADM        OGDMConfig.argparse_defaults()      --ogdm True --ogdm_k 0.2
    EDM        @OGDMConfig.click_options           --ogdm --ogdm-k=0.2
    LDM        OGDMConfig.from_mapping(node)       model.params.ogdm.k: 0.2
    diffusers  OGDMConfig.add_arguments(parser)    --ogdm --ogdm-k 0.2
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

PREFIX = "ogdm"
SWITCH_HELP = "train with observation guidance"


def _setting(default, help, *, choices=None, low=None, high=None, above=None):
    """A dataclass field that knows its help text and its allowed range.

    `low` and `high` are inclusive bounds, `above` is an exclusive lower bound.
    """
    meta = {"help": help, "choices": choices, "low": low, "high": high, "above": above}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class OGDMConfig:
    """Settings of observation-guided training. Bad values raise ValueError at once."""

    projection: str = _setting("euler", "solver step Phi that projects x_t to x_{t-s}",
                               choices=("euler", "heun"))  # fmt: skip
    k: float = _setting(0.2, "lookahead range: s ~ U(1, min(t, floor(k T)))", low=0, high=1)
    gamma: float = _setting(0.025, "weight of the emission loss", low=0.0)
    t_max: float = _setting(1.0, "highest t whose emission loss counts, as a fraction of T",
                            low=0.0, high=1.0)  # fmt: skip
    adversarial: str = _setting("nonsaturating", "adversarial form: the paper's, or the hinge loss",
                                choices=("nonsaturating", "hinge"))  # fmt: skip
    r1: float = _setting(0.01, "weight of R1, the squared gradient norm of D at real data", low=0.0)
    r1_every: int = _setting(
        16, "steps between R1 penalties; the weight is multiplied by it", low=1
    )
    d_kind: str = _setting("paper", "D's architecture: the paper's, or a light one",
                           choices=("paper", "light"))  # fmt: skip
    d_width: float = _setting(1.0, "width of D; 1 is its full size", above=0.0)
    d_lr: float = _setting(1e-3, "learning rate of D", above=0.0)
    d_betas: tuple[float, float] = _setting((0.9, 0.999), "Adam's betas for D, as B1,B2",
                                            low=0.0, high=1.0)  # fmt: skip
    d_precision: str = _setting("fp32", "arithmetic of D's convolutions", choices=("fp32", "bf16"))
    fused: bool = _setting(False, "one pass of D over the fakes serves both updates")
    seed: int = _setting(0, "seed of D's weights and of the lookahead draws", low=0, high=2**63 - 1)

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, _coerce(f, getattr(self, f.name)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: safe to write to JSON or to a checkpoint."""
        return asdict(self) | {"d_betas": list(self.d_betas)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> OGDMConfig:
        """From bare field names: a dict, keyword arguments, an OmegaConf node."""
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(mapping) - set(names))
        if unknown:
            raise ValueError(f"unknown OGDM setting {unknown[0]!r}; known are {', '.join(names)}")
        return cls(**{name: mapping[name] for name in mapping})

    @classmethod
    def from_args(cls, args: argparse.Namespace | Mapping[str, Any]) -> OGDMConfig | None:
        """From parsed flags (`ogdm`, `ogdm_k`, ...); None when `--ogdm` is off."""
        values = args if isinstance(args, Mapping) else vars(args)
        if not values.get(PREFIX):
            return None
        return cls(**{f.name: values[_dest(f)] for f in fields(cls) if _dest(f) in values})

    @classmethod
    def argparse_defaults(cls) -> dict[str, Any]:
        """{"ogdm": False, "ogdm_k": 0.2, ...}, for trainers that make their flags from a dict."""
        return {PREFIX: False} | {_dest(f): _plain(f.default) for f in fields(cls)}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds `--ogdm` and one flag per setting; dashes and underscores both work."""
        group = parser.add_argument_group("observation guidance (OGDM)")
        group.add_argument(
            f"--{PREFIX}", nargs="?", const=True, default=False, type=_argparse_bool,
            metavar="BOOL", help=SWITCH_HELP,
        )  # fmt: skip
        for f in fields(cls):
            kwargs = {"nargs": "?", "const": True} if isinstance(f.default, bool) else {}
            group.add_argument(
                *_names(f), dest=_dest(f), default=_plain(f.default), type=_argparse_type(f),
                metavar=_metavar(f), help=_help(f), **kwargs,
            )  # fmt: skip

    @classmethod
    def click_options(cls, command):
        """The same flags as a click decorator: `--ogdm`, `--ogdm-k`, ..."""
        import click

        switch = {"is_flag": False, "flag_value": True}  # the value may be left out
        for f in reversed(fields(cls)):
            kwargs = switch if isinstance(f.default, bool) else {}
            command = click.option(
                *_names(f), _dest(f), default=_plain(f.default), type=_click_type(f),
                metavar=_metavar(f), help=_help(f), **kwargs,
            )(command)  # fmt: skip
        return click.option(
            f"--{PREFIX}", default=False, type=click.BOOL, metavar="BOOL", help=SWITCH_HELP,
            **switch,
        )(command)  # fmt: skip


def _dest(f) -> str:
    return f"{PREFIX}_{f.name}"


def _flag(f) -> str:
    return "--" + _dest(f).replace("_", "-")


def _names(f) -> list[str]:
    """The flag with dashes and with underscores, once where they are the same."""
    return list(dict.fromkeys((_flag(f), f"--{_dest(f)}")))


def _plain(default):
    return ",".join(map(str, default)) if isinstance(default, tuple) else default


def _help(f) -> str:
    return f"{f.metadata['help']} (default: {_plain(f.default)})"


def _metavar(f) -> str | None:
    if isinstance(f.default, bool):
        return "BOOL"
    if f.metadata["choices"]:
        return "|".join(f.metadata["choices"])
    return "B1,B2" if isinstance(f.default, tuple) else type(f.default).__name__.upper()


def _range(f) -> str:
    """The allowed values in words, for error messages."""
    m = f.metadata
    if m["choices"]:
        return " or ".join(m["choices"])
    if isinstance(f.default, bool):
        return "true or false"
    if isinstance(f.default, tuple):
        return f"two numbers B1,B2 in [{m['low']:g}, {m['high']:g})"
    kind = "a whole number" if isinstance(f.default, int) else "a number"
    if m["above"] is not None:
        return f"{kind} > {m['above']:g}"
    if m["high"] is None:
        return f"{kind} >= {m['low']:g}"
    return f"{kind} in [{m['low']}, {m['high']}]"


def _parse_bool(value) -> bool:
    text = str(value).strip().lower()
    if text in ("true", "t", "yes", "y", "on", "1"):
        return True
    if text in ("false", "f", "no", "n", "off", "0"):
        return False
    raise ValueError(f"not a truth value: {value!r}")


def _coerce(f, value):
    """Checks one value against its field; returns it in the field's own type."""
    m = f.metadata
    bad = ValueError(f"{_flag(f)}: {value!r} is not allowed; expected {_range(f)}")
    try:
        if isinstance(f.default, bool):
            return _parse_bool(value)
        if isinstance(f.default, tuple):
            parts = value.split(",") if isinstance(value, str) else value
            value = tuple(float(part) for part in parts)
            if len(value) != 2 or not all(m["low"] <= part < m["high"] for part in value):
                raise bad
            return value
        if isinstance(value, bool):
            raise bad
        if isinstance(f.default, int):
            if not isinstance(value, str) and int(value) != value:
                raise bad
            value = int(value)
        elif isinstance(f.default, float):
            value = float(value)
            if not math.isfinite(value):
                raise bad
    except (TypeError, ValueError, OverflowError) as error:
        raise bad from (None if error is bad else error)
    if (
        (m["choices"] and value not in m["choices"])
        or (m["low"] is not None and value < m["low"])
        or (m["high"] is not None and value > m["high"])
        or (m["above"] is not None and value <= m["above"])
    ):
        raise bad
    return value


def _argparse_bool(text) -> bool:
    try:
        return _parse_bool(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; expected true or false") from error


def _argparse_type(f):
    def parse(text):
        try:
            return _plain(_coerce(f, text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _click_type(f):
    import click

    class Setting(click.ParamType):
        name = type(f.default).__name__

        def convert(self, value, param, ctx):
            try:
                return _plain(_coerce(f, value))
            except ValueError as error:
                self.fail(str(error), param, ctx)

    return Setting()
