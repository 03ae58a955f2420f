"""openai/guided-diffusion."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ogdm_core.files import read_json
from run import launch
from run.launch import Command, Engine
from run.presets import Preset, discretisation_of

from .base import PYTHON, Backbone, Flags

if TYPE_CHECKING:
    from torch import Tensor

    from run.sampling import Network

MODEL = {
    "--num_channels": 128, "--num_res_blocks": 3, "--attention_resolutions": "16,8",
    "--num_heads": 1, "--use_scale_shift_norm": True, "--learn_sigma": False,
    "--diffusion_steps": 1000, "--noise_schedule": "linear",
}  # fmt: skip
SIZE_AND_DROPOUT = {"cifar10": (32, 0.1), "celeba64": (64, 0.0)}
# A rate at which three steps leave a mark, and an EMA that follows.
SMOKE = {"--log_interval": 1, "--lr": "1e-2", "--ema_rate": 0.5}
SMALL_MODEL = {
    "smoke": {"--num_channels": 32, "--num_res_blocks": 1, "--channel_mult": "1,1", "--attention_resolutions": 16},
    "cpu": {"--num_channels": 32, "--num_res_blocks": 1, "--channel_mult": "1,1", "--attention_resolutions": "2",
            "--num_heads": 4, "--dropout": 0},
    "cifar10": {"--num_channels": 32, "--num_res_blocks": 1, "--channel_mult": "1,2,2", "--attention_resolutions": 8,
                "--dropout": 0},
}  # fmt: skip

GIVE_FLAGS = (
    "give the flags of its training: run/solvers.sh --native '--image_size 32 ...', or run/export.sh ... -- "
    "--image_size 32 ...; run/evaluate.sh takes the npz of scripts/image_sample.py, too"
)


def model_flags(preset: Preset) -> Flags:
    """The network and the diffusion of a row."""
    size, dropout = SIZE_AND_DROPOUT[preset.dataset]
    return {"--class_cond": preset.conditional, "--image_size": size, **MODEL, "--dropout": dropout}


class Adm(Backbone):
    """Several processes by MPI. Its trainer has no seed."""

    name = "adm"
    folder = "guided-diffusion"
    script = "scripts/image_train.py"
    packages = ("mpi4py", "blobfile")
    # Seeing Slurm, mpiexec would call srun for its processes, and wait for resources that we hold.
    in_slurm: Mapping[str, str] = {"HYDRA_LAUNCHER": "fork"}
    model = "model.pt"
    weights = "ema_*.pt"
    checkpoint = "opt*.pt"
    observed_checkpoint = "ogdm*.pt"
    samples = "samples_*.npz"
    checkpoint_gb = 1.2
    suffix = ".pt"
    takes_flags = True
    # --batch_size is per process; the whole batch is the preset's.
    not_in_key = frozenset({"--data_dir", "--init_checkpoint", "--batch_size", "--resume_checkpoint", "--model_path"})
    trainer_has_seed = False
    mirrors = True
    small_images: Mapping[str, tuple[int, int]] = {
        "smoke": (8, 24),
        "cpu": (64, 4_000 * 64),
        "cifar10": (64, 12_000 * 64),
    }

    def launcher(self, engine: Engine) -> tuple[str, ...]:
        """mpiexec; outside of Slurm it finds its hosts in HYDRA_HOST_FILE."""
        nodes = launch.slurm_nodes() if engine.nodes > 1 else []
        hosts = ("-launcher", "slurm", "-hosts", ",".join(nodes)) if nodes else ()
        spread = (*hosts, "-ppn", str(engine.per_node)) if engine.nodes > 1 else ()
        return (launch.beside("mpiexec"), "-n", str(engine.gpus), *spread, *PYTHON)

    def environment(self, out: Path | None) -> dict[str, str]:
        return {"OPENAI_LOGDIR": str(out)}

    def training(self, preset: Preset, engine: Engine, data: str, out: Path, init: str, seed: int | None) -> Flags:
        """Upstream ends a run by --lr_anneal_steps only, so the learning rate falls linearly to zero."""
        if preset.training == "finetune" and not init:
            raise ValueError(
                f"{preset.name} fine-tunes: give the baseline's EMA weights with --init ema_0.9999_NNNNNN.pt"
            )
        return {
            "--data_dir": data, **model_flags(preset), "--schedule_sampler": "uniform", "--lr": "1e-4",
            "--ema_rate": "0.9999", "--batch_size": preset.batch // engine.gpus,
            "--lr_anneal_steps": preset.steps, **({"--init_checkpoint": init} if init else {}),
        }  # fmt: skip

    def ogdm(self, **settings: Any) -> Flags:
        return {f"--ogdm_{name}": str(value) for name, value in settings.items()}

    def sampling(
        self, preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int, seed: int
    ) -> tuple[str, Flags]:
        return "scripts/image_sample.py", {
            "--model_path": model, **model_flags(preset), "--num_samples": images, "--batch_size": 250,
            "--seed": seed, "--sampler": sampler, "--nfe": nfe,
            "--discretization": discretisation_of(preset, sampler),
        }  # fmt: skip

    def as_trained(self, command: Command) -> Command:
        """flags.json beside the weights has the place of a row's network; the script adds its other flags."""
        names = ("--model_path", "--resume_checkpoint", "--init_checkpoint")
        weights = next((Path(command.flags[name]) for name in names if name in command.flags), None)
        if weights is None or not (file := weights.with_name("flags.json")).is_file():
            return command
        theirs = {f"--{name}": value for name, value in read_json(file).items()}
        return replace(command, flags={n: theirs.get(n, v) if n in MODEL else v for n, v in command.flags.items()})

    def built(
        self, weights: Path, third_party: Path, native: Sequence[str], **fixed: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        """(flags, network with the weights, diffusion). The flags are those in flags.json beside the weights, which
        trainings write, and the words in `native`, which must agree; then upstream's defaults, and `fixed`."""
        from ogdm_core import trust
        from ogdm_core.cli import Parser

        self.put_on_path(third_party)
        from guided_diffusion import script_util

        from ogdm_core.adm import beside

        known = script_util.model_and_diffusion_defaults()
        parser = Parser(prog="ADM's network")
        script_util.add_dict_to_argparser(parser, known | {"num_classes": 0, "weights": str(weights)})
        beside.adopt(parser, "weights")
        parsed = parser.parse_args(native)
        if not beside.check(str(weights), parsed, "model flags") and not native:
            raise ValueError(f"{weights}: there is no {beside.FILE} beside it, which trainings write, so its network "
                             f"is not known; {GIVE_FLAGS}")  # fmt: skip
        del parsed.weights
        flags = vars(parsed) | fixed
        model, diffusion = script_util.create_model_and_diffusion(**{name: flags[name] for name in known})
        try:
            model.load_state_dict(trust.load(weights, map_location="cpu", weights_only=True))
        except RuntimeError as error:
            why = str(error).splitlines()[-1].strip()[:200]
            raise ValueError(f"{weights} does not fit the network of these flags; {GIVE_FLAGS} ({why})") from error
        return flags, model.eval(), diffusion

    def network(self, weights: Path, third_party: Path, native: Sequence[str], device: str) -> "Network":
        """As the patched image_sample.py samples, predicted x_0 not clipped."""
        from run.sampling import Network

        flags, model, diffusion = self.built(weights, third_party, native)
        from guided_diffusion.script_util import NUM_CLASSES

        from ogdm_core.adm.train import make_eps_fn, schedule_of

        classes = (flags["num_classes"] or NUM_CLASSES) if flags["class_cond"] else 0
        if flags["use_fp16"]:
            model.convert_to_fp16()
        model.to(device)

        def eps_of(label: "Tensor | None") -> Any:
            return make_eps_fn(diffusion, model, {} if label is None else {"y": label})

        size = flags["image_size"]
        return Network(schedule_of(diffusion), (3, size, size), eps_of, device, classes)

    def resumed(self, command: Command, folder: Path) -> Command | None:
        last = launch.newest(folder, self.observed_checkpoint if "--ogdm" in command.flags else self.checkpoint, True)
        if last is None:
            return command
        (step,) = re.findall(r"\d+", last.name)
        return replace(command, flags={**command.flags, "--resume_checkpoint": last.with_name(f"model{step}.pt")})

    def checkpoints_kept(self, preset: Preset) -> int:
        return preset.steps // 10_000 + 1  # upstream saves every 10,000 steps

    def small_training(self, scale: str, preset: Preset, init: str, size: int, rate: str) -> Flags:
        average = "0.999" if scale == "cifar10" and not init else "0.995"
        own = SMOKE if scale == "smoke" else {"--log_interval": 500, "--ema_rate": average, "--lr": rate}
        return SMALL_MODEL[scale] | own | {"--image_size": size}

    def small_sampling(self, scale: str, size: int, images: int) -> Flags:
        return SMALL_MODEL[scale] | {"--image_size": size, "--batch_size": images if scale == "smoke" else 500}

    def pack(self, checkpoint: Path, third_party: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
        """The EMA's state dict."""
        from ogdm_core import trust

        return trust.load(checkpoint, map_location="cpu", weights_only=True), {}

    def unpack(self, state: dict[str, "Tensor"], kept: dict[str, str], checkpoint: Path, third_party: Path) -> None:
        import torch

        from ogdm_core.files import atomic_write

        with atomic_write(checkpoint) as file:
            torch.save(state, file)


BACKBONE = Adm()
