"""willisma/SiT."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from run import launch
from run.launch import Command, Engine
from run.presets import Preset

from .base import Flags, Torchrun

if TYPE_CHECKING:
    from torch import Tensor

    from ogdm_core.solvers import EpsFn
    from run.sampling import Network

IMAGENET = 1_281_167  # images; upstream counts epochs
FINETUNE = Preset("imagenet256-sit-ogdm-ft", "imagenet256", "finetune", 256, 4 * IMAGENET, "euler")
SMALL = {
    "smoke": {"--depth": 2, "--hidden-size": 24, "--num-heads": 2},
    "cpu": {"--depth": 4, "--hidden-size": 64, "--num-heads": 4},
}
DIGITS = {32: 96, 8: 1797, 16: 5000}  # size -> images of the tables' stand-ins: a smoke run's, scikit-learn's, MNIST's
NETWORK = {"--model": "SiT-XL/2", "--image-size": 256, "--num-classes": 1000}


class Sit(Torchrun):
    """Several processes by torchrun. It makes a folder of its own below --results-dir."""

    name = "sit"
    title = "SiT"
    folder = "SiT"
    script = "train.py"
    packages = ("timm", "torchdiffeq", "diffusers")
    model = "model.pt"
    weights = "*/checkpoints/[0-9]*.pt"
    checkpoint = "*/checkpoints/[0-9]*.pt"
    observed_checkpoint = "*/checkpoints/ogdm-*.pt"
    samples = "*.npz"
    suffix = ".pt"
    mark = b"y_embedder"  # a part of the network
    takes_flags = True
    checkpoint_gb = 11.0  # 675 million weights: network, EMA, two moments of Adam
    not_in_key = frozenset({"--data-path", "--results-dir", "--init", "--ckpt", "--latents", "--sample-dir"})
    mirrors = True
    presets = (
        Preset("imagenet256-sit-baseline", "imagenet256", "baseline", 256, 1400 * IMAGENET),
        FINETUNE,
        FINETUNE.control,
    )
    small_images: Mapping[str, tuple[int, int]] = {"smoke": (20, 40), "cpu": (64, 8_192 * 64)}

    def training(self, preset: Preset, engine: Engine, data: str, out: Path, init: str, seed: int | None) -> Flags:
        """Upstream's settings; a fine-tune needs weights, since upstream's script downloads them elsewhere."""
        if preset.training == "finetune" and not init:
            raise ValueError(f"{preset.name} fine-tunes: give SiT-XL-2-256x256.pt, or your own weights, with --init")
        return {
            "--data-path": data, "--results-dir": out, **NETWORK, "--global-batch-size": preset.batch,
            "--epochs": preset.images // IMAGENET, "--ckpt-every": 5000,
            **({"--init": init} if preset.training == "finetune" else {}),
            **({} if seed is None else {"--global-seed": seed}),
        }  # fmt: skip

    def sampling(
        self, preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int, seed: int
    ) -> tuple[str, Flags]:
        """The npz stands beside the folder of images, which upstream names after the settings."""
        return "sample_ddp.py", {
            "ODE": None, **NETWORK, "--ckpt": model, "--sample-dir": out, "--num-fid-samples": images,
            "--global-seed": seed, "--per-proc-batch-size": 32, "--sampler": sampler, "--nfe": nfe,
        }  # fmt: skip

    def network(self, weights: Path, third_party: Path, native: Sequence[str], device: str) -> "Network":
        """As the patched sample_ddp.py samples, without guidance; `native` is for what the file does not say."""
        self.put_on_path(third_party)
        from ogdm_core.sit import compat

        compat.install()
        from ogdm_core.cli import Parser
        from ogdm_core.sit.sample import built
        from ogdm_core.sit.train import edge_of, make_eps_fn, schedule_of
        from run.sampling import Network

        state = compat.weights(compat.checkpoint(str(weights)))
        parser = Parser(prog="SiT's network")
        for name, usual in {"path_type": "Linear", "prediction": "velocity", "vae": "ema"}.items():
            parser.add_argument(f"--{name.replace('_', '-')}", default=state.flags.get(name, usual))
        parser.add_argument("--train-eps", type=float, default=state.flags.get("train_eps"))
        parser.add_argument("--num-heads", type=int, default=compat.heads(state))
        args = parser.parse_args(native)
        if args.num_heads is None:
            raise ValueError(f"{weights} does not say how many attention heads it has: give --native '--num-heads N'")
        net, schedule = built(state, args.num_heads).to(device).eval(), schedule_of(args.path_type)
        vae = compat.autoencoder.from_pretrained(f"stabilityai/sd-vae-ft-{args.vae}").to(device)
        eps_fn = make_eps_fn(net, schedule, args.prediction, edge_of(args))

        def eps_of(label: "Tensor | None") -> "EpsFn":
            return lambda x, t: eps_fn(x, t, {"y": label})

        side = net.x_embedder.img_size[0]
        return Network(schedule, (net.in_channels, side, side), eps_of, device, net.y_embedder.num_classes,
                       decode=lambda z: vae.decode(z / compat.SCALE).sample)  # fmt: skip

    def resumed(self, command: Command, folder: Path) -> Command | None:
        observed = "--ogdm" in command.flags
        last = launch.newest(folder, self.observed_checkpoint if observed else self.checkpoint, True)
        if last is None:
            return command
        flags = {name: value for name, value in command.flags.items() if name != "--init"}
        return replace(command, flags=flags | {"--ckpt": last.with_name(last.name.removeprefix("ogdm-"))})

    def checkpoints_kept(self, preset: Preset) -> int:
        return preset.steps // 5000

    def small_training(self, scale: str, preset: Preset, init: str, size: int, rate: str) -> Flags:
        """As many epochs as there are steps in them at least, and a checkpoint behind the last."""
        batch, _ = self.small_images[scale]
        steps = DIGITS[size] // batch
        epochs = -(-preset.steps // steps)
        own = {"--log-every": 1, "--ckpt-every": 2} if scale == "smoke" else {
            "--log-every": 100, "--ckpt-every": epochs * steps, "--lr": rate, "--ema": 0.995}  # fmt: skip
        return self._small(scale, size) | {"--epochs": epochs, "--num-workers": 0} | own

    def small_sampling(self, scale: str, size: int, images: int) -> Flags:
        return self._small(scale, size) | {"--per-proc-batch-size": images if scale == "smoke" else 500}

    def _small(self, scale: str, size: int) -> Flags:
        """A network on latents of this size, without an autoencoder."""
        return {"--model": "SiT-S/2", "--image-size": 8 * size, "--num-classes": 10, "--vae": "identity"} | SMALL[scale]

    def archive(self, name: str) -> str:
        return f"{name}-by-class"

    def convert(self, images: Path, archive: Path, engine: Engine) -> Command:
        """A folder per class, as upstream reads images, which an autoencoder makes eight times smaller."""
        return launch.module("run.tables.stand_in", archive, **{"--classes-of": images})


BACKBONE = Sit()
