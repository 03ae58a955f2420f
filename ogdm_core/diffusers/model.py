"""OGDM for diffusers' U-Nets, and our samplers for them.

The scheduler's config says what the network predicts; everything here turns that into eps. The
condition is the network's further arguments by name: {"class_labels": label} for a class-conditional
`UNet2DModel`, {"encoder_hidden_states": text} for a `UNet2DConditionModel`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import read_json
from ..forward import Recorder
from ..observer import Observer
from ..schedule import DiscreteVP, expand
from ..solvers import ConditionalEpsFn


def unet_config(path: str | Path) -> Path:
    """The config of the U-Net in a model's folder: in unet/, or, as in the hub's older models, at its root."""
    usual = Path(path, "unet/config.json")
    return usual if usual.is_file() else Path(path, "config.json")


def check_model(path: str) -> None:
    """Raises unless `path` is a folder in diffusers' format or may be a hub name."""
    if not Path(path).exists():
        if path.count("/") != 1:
            raise FileNotFoundError(f"there is no folder {path!r}, and it is not a hub name OWNER/NAME")
        return
    config = unet_config(path)
    if not config.is_file():
        raise FileNotFoundError(
            f"{path!r} has no unet/config.json and no config.json; is it a model in diffusers' format?"
        )
    kind = read_json(config).get("_class_name", "UNet2DModel")
    if kind != "UNet2DModel":
        raise ValueError(f"{config} is of a {kind}; only UNet2DModel is supported here, others by a loop of your own")
    for file in (Path(path, "scheduler/scheduler_config.json"), Path(path, "scheduler_config.json")):
        if file.is_file():
            read_json(file)


def load_model(path: str) -> tuple[Any, Any]:
    """(UNet2DModel, DDPMScheduler) from a diffusers folder or hub name, each in its folder or at the root."""
    check_model(path)
    from diffusers import DDPMScheduler, UNet2DModel  # images are evaluated without this package, too

    unet, info = UNet2DModel.from_pretrained(path, **_place(UNet2DModel, path, "unet"), output_loading_info=True)
    if lost := info["missing_keys"]:
        where = unet_config(path).parent
        raise ValueError(f"{where} lacks {len(lost)} of the network's tensors, such as {min(lost)}; get it again")
    return unet, DDPMScheduler.from_pretrained(path, **_place(DDPMScheduler, path, "scheduler"))


def _place(kind: Any, path: str, folder: str) -> dict[str, str]:
    """The subfolder that holds a part of a model, as diffusers' functions take it; none for the root."""
    try:
        kind.load_config(path, subfolder=folder)
    except OSError as error:
        why: BaseException | None = error
        while why is not None:
            if type(why).__name__ == "LocalEntryNotFoundError":
                raise OSError(
                    f"the hub is out of reach, and {path} is not in its cache; give a local folder, or try again online"
                ) from error
            why = why.__cause__ or why.__context__
        return {}
    return {"subfolder": folder}


def schedule_of(scheduler, sigma_data: float = 0.5) -> DiscreteVP:
    """The noise schedule behind any diffusers scheduler that has `alphas_cumprod`."""
    return DiscreteVP(scheduler.alphas_cumprod, sigma_data)


def to_eps(prediction: Tensor, x_t: Tensor, t: Tensor, schedule: DiscreteVP, kind: str) -> Tensor:
    """eps from what the network predicts: `epsilon`, `sample` (x_0) or `v_prediction`.

    eps = (x_t - a_t x_0) / b_t,   eps = a_t v + b_t x_t.
    """
    if kind == "epsilon":
        return prediction
    a_t, b_t = expand(schedule.a(t), x_t), expand(schedule.b(t), x_t)
    if kind == "sample":
        return (x_t - a_t * prediction) / b_t
    if kind == "v_prediction":
        return a_t * prediction + b_t * x_t
    raise ValueError(f"prediction_type {kind!r} is not supported; use epsilon, sample or v_prediction")


def target_of(x_0: Tensor, eps: Tensor, t: Tensor, schedule: DiscreteVP, kind: str) -> Tensor:
    """What the network is trained to predict."""
    if kind == "epsilon":
        return eps
    if kind == "sample":
        return x_0
    return expand(schedule.a(t), x_0) * eps - expand(schedule.b(t), x_0) * x_0


def make_eps_fn(
    unet: Callable, schedule: DiscreteVP, kind: str = "epsilon", cond: dict[str, Any] | None = None
) -> ConditionalEpsFn:
    """The network as eps(x [N, ...], t [N]), with t = 1..T, under `cond`, which may be given per call."""

    def eps_fn(x: Tensor, t: Tensor, cond: dict[str, Any] | None = cond) -> Tensor:
        return to_eps(unet(x, t - 1, **cond or {}).sample, x, t, schedule, kind)

    return eps_fn


def training_loss(
    unet: Callable,
    x_0: Tensor,
    eps: Tensor,
    t: Tensor,
    schedule: DiscreteVP,
    kind: str = "epsilon",
    cond: dict[str, Any] | None = None,
    label: Tensor | None = None,
    observer: Observer | None = None,
    x0_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """L_transition + gamma L_emission, and L_transition alone: two scalars.

    One forward pass of the network serves both terms (Heun's projection takes one more). `label` is
    what D is conditioned on.
    An error of eps is sigma times as large in x_0. With `x0_weight` above 1, L_transition is
    weighted by sigma^2, held between 1 and this number: the loss of x_0 where sigma is in between.
    """
    x_t, network = schedule.diffuse(x_0, eps, t), Recorder(unet)
    prediction = network(x_t, t - 1, **cond or {}).sample.float()
    target = target_of(x_0, eps, t, schedule, kind)
    error = (prediction - target).square()
    if x0_weight > 1:
        error = error * expand(schedule.sigma(t).square().clamp(1, x0_weight), error)
    transition = error.mean()
    if observer is None:
        return transition, transition.detach()
    emission = observer.observe(
        x_0=x_0, eps=eps, x_t=x_t, t=t, eps_t=to_eps(prediction, x_t, t, schedule, kind),
        # Past DDP's wrapper: a second pass must not announce another backward.
        eps_fn=make_eps_fn(getattr(unet, "module", unet), schedule, kind), cond=cond, label=label,
        rng=network.rng, transition=error.flatten(1).mean(1),
    )  # fmt: skip
    return transition + emission.mean(), transition.detach()
