"""The settings of the method, once.

`OGDMConfig` is the single place where a setting has a name, a type, a default, a range and a help
text. `flags` turns it into every backbone's flags, so that they cannot drift apart.
"""
# ruff: noqa: E501  the settings stand in aligned columns

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any


def _setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field with its help text and range: [low, high], or everything > above."""
    meta = {"help": help, "choices": choices, "low": low, "high": high, "above": above}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class OGDMConfig:
    """Settings of observation-guided training. A bad value raises ValueError at once."""

    # fmt: off
    projection: str     = _setting("euler", "solver step Phi that projects x_t to x_{t-s}", choices=("euler", "heun"))
    k: float            = _setting(0.4, "lookahead range: s ~ U(1, min(t, floor(k T)))", low=0, high=1)
    rho: float          = _setting(20.0, "strength of the observation: the bound of its loop gain, from which each sample has its gamma", low=0.0)
    plain_end: float    = _setting(0.33, "last part of the run that trains on the plain loss alone, as a fraction; needs a known end", low=0.0, high=0.99)
    gamma: float | None = _setting(None, "a fixed weight of the emission loss, as in the paper, in place of rho and plain_end", low=0.0)
    adversarial: str    = _setting("nonsaturating", "adversarial form: the paper's, or the hinge loss", choices=("nonsaturating", "hinge"))
    r1: float           = _setting(0.01, "weight of R1, the squared gradient norm of D at real data", low=0.0)
    r1_every: int       = _setting(16, "steps between R1 penalties; the weight is multiplied by it", low=1)
    d_kind: str         = _setting("auto", "D's architecture: the paper's, a light one, or the paper's if it costs no more than the denoiser's step", choices=("paper", "light", "auto"))
    d_width: float      = _setting(1.0, "width of D; 1 is its full size", above=0.0)
    d_lr: float         = _setting(1e-3, "learning rate of D", above=0.0)
    d_mapping_lr: float = _setting(1.0, "learning rate of D's mapping of (t, s), as a multiple of d_lr", above=0.0)
    d_precision: str    = _setting("fp32", "arithmetic of D's convolutions", choices=("fp32", "bf16"))
    fused: bool         = _setting(False, "one pass of D over the fakes serves both updates")
    augment_labels: str = _setting("keep", "EDM: project with the augmentation labels, or by one more evaluation without", choices=("keep", "drop"))
    seed: int           = _setting(0, "seed of D's weights and of the lookahead draws", low=0, high=2**63 - 1)
    # fmt: on

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check(f, getattr(self, f.name)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: safe to write to JSON or to a checkpoint."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], backbone: str = "") -> OGDMConfig:
        """From bare field names: a dict, keyword arguments, an OmegaConf node.

        The key `recipe` names the defaults; `backbone` is the one that they are for.
        """
        names = [f.name for f in fields(cls)]
        given = {name: mapping[name] for name in mapping if name != "recipe"}
        if list(given.get("d_betas", ())) == [0.9, 0.999]:  # a setting once, which configs of that time hold
            del given["d_betas"]
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"unknown OGDM setting {unknown[0]!r}; known are {', '.join(names)}")
        return cls(**recipe(mapping.get("recipe") or "default", backbone) | given)


# Defaults by name, for all backbones ("") or one of them.
# default   the dataclass as it stands: rho gives each sample its weight; its name was "ours"
# release   the paper's k and gamma, and what the authors' released code sets where the paper is silent; no
#           LDM code was released, ADM's settings stand in (docs/lab/choices.md)
RELEASE = {
    "k": 0.2,
    "gamma": 0.025,
    "adversarial": "hinge",
    "r1": 0.25,
    "r1_every": 1,
    "d_kind": "paper",
    "d_lr": 1e-4,
    "d_mapping_lr": 0.01,
}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {"": {}},
    "release": {"": RELEASE, "edm": RELEASE | {"r1": 1.0, "d_lr": 1e-3, "augment_labels": "drop"}},
}


def recipe(name: str, backbone: str = "") -> dict[str, Any]:
    """The defaults that a recipe changes, for a backbone (adm, edm, ldm, diffusers)."""
    name = "default" if name == "ours" else name
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; use one of {', '.join(RECIPES)}")
    ours = {"fused": True} if backbone == "diffusers" else {}
    return RECIPES[name].get(backbone, RECIPES[name][""]) | ours


def allowed(f: Field) -> str:
    """The allowed values of a setting, in words."""
    m = f.metadata
    if m["choices"]:
        return " or ".join(m["choices"])
    if isinstance(f.default, bool):
        return "true or false"
    kind = "a whole number" if isinstance(f.default, int) else "a number"  # None: a number that may be left out
    if m["above"] is not None:
        return f"{kind} > {m['above']:g}"
    if m["high"] is None:
        return f"{kind} >= {m['low']:g}"
    return f"{kind} in [{m['low']}, {m['high']}]"


def parse_bool(value: object) -> bool:
    """True or false from a flag's text; ValueError for anything else."""
    text = str(value).strip().lower()
    if text in ("true", "t", "yes", "y", "on", "1"):
        return True
    if text in ("false", "f", "no", "n", "off", "0"):
        return False
    raise ValueError(f"{value!r} is not a truth value; expected true or false")


def check(f: Field, value: Any) -> Any:
    """The value in the setting's own type; ValueError where it is not allowed."""
    m = f.metadata
    if value is None and f.default is None:
        return None
    bad = ValueError(f"OGDM setting {f.name}: {value!r} is not allowed; expected {allowed(f)}")
    try:
        if isinstance(f.default, bool):
            return parse_bool(value)
        if isinstance(value, bool):
            raise bad
        if isinstance(f.default, int):
            if not isinstance(value, str) and int(value) != value:
                raise bad
            value = int(value)
        elif f.default is None or isinstance(f.default, float):
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
