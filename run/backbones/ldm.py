"""CompVis/latent-diffusion."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from run import launch
from run.launch import Command, Engine
from run.presets import Preset, discretisation_of

from .base import PYTHON, Backbone, Flags

if TYPE_CHECKING:
    from torch import Tensor

    from run.sampling import Network

HERE = Path(__file__).parent
BASE = "configs/latent-diffusion/lsun_churches-ldm-kl-8.yaml"
FINETUNE = HERE / "ldm_finetune.yaml"  # what Table 5 does not say of a fine-tune
SMALL = {"smoke": HERE / "ldm_smoke.yaml", "cpu": HERE / "ldm_cpu.yaml"}
RELEASED = "models/ldm/lsun_churches256/model.ckpt"
FIRST_STAGE = "models/first_stage_models/kl-f8/model.ckpt"
# Of a resumed run; its saved config has the rest, but not how the batch was split.
KEPT_ON_RESUME = ("-t", "--gpus", "--num_nodes", "--scale_lr", "-s", "data.params.batch_size",
                  "lightning.trainer.max_steps")  # fmt: skip
PARTS = ("train", "validation")


class Ldm(Backbone):
    """main.py starts its processes itself. LSUN is read where upstream looks for it, in data/lsun."""

    name = "ldm"
    folder = "latent-diffusion"
    script = "main.py"
    packages = ("pytorch_lightning", "omegaconf", "einops")
    in_slurm: Mapping[str, str] = {"SLURM_JOB_NAME": "interactive"}  # else Lightning expects one task per GPU
    model = "model.ckpt"
    weights = checkpoint = "runs/*/checkpoints/last*.ckpt"
    checkpoint_gb = 5.5
    suffix = ".ckpt"
    # The batch size is per process; the whole batch is the preset's.
    not_in_key = frozenset({
        "--gpus", "--num_nodes", "-l", "-r", "--npz", "data.params.batch_size", "model.target",
        "model.params.ckpt_path", *(f"data.params.{part}.params.folder" for part in PARTS),
    })  # fmt: skip
    samples_in_one_process = True
    small_images: Mapping[str, tuple[int, int]] = {"smoke": (8, 24), "cpu": (64, 4_000 * 64)}

    def launcher(self, engine: Engine) -> tuple[str, ...]:
        """python, by srun inside a job of Slurm on several nodes."""
        return (*launch.srun(engine, engine.per_node), *PYTHON)

    def training(self, preset: Preset, engine: Engine, data: str, out: Path, init: str, seed: int | None) -> Flags:
        """The row is on upstream's dotlist. A fine-tune starts from the released model, where upstream's script
        puts it, unless others are given. `data` is for data sets that say where they are."""
        return {
            "--base": (BASE, *([str(FINETUNE)] if preset.training == "finetune" else [])),
            "-t": True, "--gpus": "".join(f"{i}," for i in range(engine.per_node)),
            **({"--num_nodes": engine.nodes} if engine.nodes > 1 else {}),
            "--scale_lr": False, "-l": f"{out}/runs", **({} if seed is None else {"-s": seed}),
            "data.params.batch_size": preset.batch // engine.gpus,
            "lightning.trainer.max_steps": preset.steps,
            **({"model.params.ckpt_path": init} if init else {}),
        }  # fmt: skip

    def switch_on(self) -> Flags:
        return {"model.target": "ogdm_core.ldm.train.OGDMLatentDiffusion"}

    def ogdm(self, **settings: Any) -> Flags:
        return {f"model.params.ogdm.{name}": str(value) for name, value in settings.items()}

    def sampling(
        self, preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int, seed: int
    ) -> tuple[str, Flags]:
        return "scripts/sample_diffusion.py", {
            "-r": model, "-n": images, "--batch_size": 100, "--seed": seed, "--sampler": sampler, "--nfe": nfe,
            "--discretization": discretisation_of(preset, sampler), "-l": f"{out}/images",
            "--npz": f"{out}/samples.npz",
        }  # fmt: skip

    def network(self, weights: Path, third_party: Path, native: Sequence[str], device: str) -> "Network":
        """As the patched sample_diffusion.py samples; x is a latent."""
        from argparse import Namespace

        from ogdm_core import trust
        from run.sampling import Network

        if problem := self.check_checkpoint(str(weights)):
            raise ValueError(problem)
        self.put_on_path(third_party)
        from ogdm_core.ldm import compat

        compat.install()
        from omegaconf import OmegaConf

        from ogdm_core.ldm.sample import configs_of, load_model_from_config
        from ogdm_core.ldm.train import classes_of, make_eps_fn, schedule_of

        beside = weights.with_name("config.yaml")
        opt = Namespace(base=[str(beside)] if beside.is_file() else [], resume=str(weights))
        config = OmegaConf.merge(*map(OmegaConf.load, configs_of(opt)))
        state = trust.load(weights, map_location="cpu", weights_only=True)["state_dict"]
        model = load_model_from_config(config.model, state).to(device)
        if model.use_ema:
            model.model_ema.copy_to(model.model)
        if model.cond_stage_model is not None and not classes_of(model):
            raise ValueError(f"{weights}: unconditional and class-conditional models only")

        def eps_of(label: "Tensor | None") -> Any:
            named = None if label is None else {model.cond_stage_model.key: label}
            return make_eps_fn(model, named and model.get_learned_conditioning(named))

        size = model.model.diffusion_model.image_size
        return Network(schedule_of(model), (model.channels, size, size), eps_of, device, classes_of(model),
                       decode=model.decode_first_stage)  # fmt: skip

    def resumed(self, command: Command, folder: Path) -> Command | None:
        last = launch.newest(folder, self.checkpoint, whole=True)
        if last is None:
            return command
        kept = {name: command.flags[name] for name in KEPT_ON_RESUME if name in command.flags}
        return replace(command, flags={"-r": last} | kept)

    def steps_left(self, command: Command, folder: Path) -> int:
        """Lightning ends well on SIGTERM, before the last step."""
        last = launch.newest(folder, self.checkpoint, whole=True)
        if last is None:
            return 0
        from ogdm_core import trust

        done = trust.load(last, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        return int(command.flags["lightning.trainer.max_steps"]) - done

    def export(self, argv: list[str]) -> int:
        from ogdm_core.ldm.export import main

        return main(argv)

    def check_training(self, preset: Preset, data: str, seed: int | None, engine: Engine) -> None:
        if data:
            raise ValueError("--data: latent-diffusion reads data/lsun in its own folder; run/prepare_data.sh lsun "
                             "puts LSUN there")  # fmt: skip

    def check_checkpoint(self, path: str) -> str:
        from ogdm_core.ldm.export import run_configs

        if Path(path).with_name("config.yaml").is_file() or run_configs(path):
            return ""
        return f"no config.yaml beside {path}, and it is in no training run; latent-diffusion needs the model's config"

    def missing_weights(self, preset: Preset, third_party: Path, init: str = "") -> str:
        path, released = (self.home(third_party) / file for file in (FIRST_STAGE, RELEASED))
        if preset.training == "finetune":
            if init or released.is_file():
                return ""
            return (f"{preset.name}: there is no {released}, the model that it starts from; upstream's "
                    "scripts/download_models.sh fetches it. Or give a baseline of your own: --init FILE")  # fmt: skip
        if preset.training != "baseline" or path.is_file():
            return ""
        return (f"{preset.name}: there is no {path}, the autoencoder that it trains in the latents of; upstream's "
                "scripts/download_first_stages.sh fetches it. Or start from the released model: --checkpoint "
                f"{preset.name}=model.ckpt")  # fmt: skip

    def checkpoints_kept(self, preset: Preset) -> int:
        return 5  # three, the last and the one before it

    def small_training(self, scale: str, preset: Preset, init: str, size: int, rate: str) -> Flags:
        tuned = [str(FINETUNE)] if preset.training == "finetune" else []
        start = {} if init else {"model.params.ckpt_path": "null"}
        flags = {"--base": (BASE, *tuned, str(SMALL[scale])), **start}
        if scale == "smoke":
            return flags
        sizes = [f"model.params{part}.image_size" for part in ("", ".unet_config.params")]
        sizes += [f"data.params.{part}.params.size" for part in PARTS]
        return {"model.base_learning_rate": rate} | flags | dict.fromkeys(sizes, size)

    def small_sampling(self, scale: str, size: int, images: int) -> Flags:
        return {} if scale == "smoke" else {"--batch_size": 500}

    def stand_in_folder(self, folder: Path) -> Flags:
        return {f"data.params.{part}.params.folder": str(folder) for part in PARTS}

    def config_files(self, flags: Mapping[str, Any]) -> list[str]:
        return [path for path in flags.get("--base", ()) if os.path.isabs(path)]

    def pack(self, checkpoint: Path, third_party: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
        """The EMA's U-Net of a checkpoint, and the first stage if it has weights."""
        from ogdm_core import trust

        state = trust.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
        ema = {f"model.{name}": short for name, short in _ema_names(state).items()}
        return {
            n: state.get(f"model_ema.{ema[n]}" if n in ema else n, state[n]) for n in state
            if n in ema or n.startswith("first_stage_model.")
        }, {}  # fmt: skip

    def unpack(self, state: dict[str, "Tensor"], kept: dict[str, str], checkpoint: Path, third_party: Path) -> None:
        """A checkpoint whose network and EMA are these weights; the EMA's count of steps starts anew."""
        import torch

        from ogdm_core.files import atomic_write

        ema = {f"model_ema.{short}": state[f"model.{name}"] for name, short in _ema_names(state).items()}
        with atomic_write(checkpoint) as file:
            torch.save({"state_dict": state | ema}, file)


def _ema_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Name of a weight of the U-Net -> its name in upstream's EMA, which has no dots."""
    names = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    return {name: name.replace(".", "") for name in names}


BACKBONE = Ldm()
