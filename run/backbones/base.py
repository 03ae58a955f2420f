"""A backbone as run/ sees it: its folder, launcher, commands, files, data and small networks.

A new backbone has to give the values that stand here without one, and the abstract methods; the others have defaults.
Needs the standard library only, so that command lines can be checked before anything is installed.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from run import launch
from run.launch import Command, Engine, python_path
from run.presets import PRESETS, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from run.sampling import Network

Flags = dict[str, Any]
PYTHON = (sys.executable,)


class Backbone(ABC):
    """One native codebase."""

    name: str  # as in ogdm_core/NAME, and the extra that installs its packages
    title = ""  # in print, where it is not the name in capitals
    folder: str  # in third_party
    script: str  # the trainer, in its folder
    packages: tuple[str, ...]  # that must be importable
    joined = False  # flags are written --flag=value
    in_slurm: Mapping[str, str] = {}  # variables inside a job that Snakemake started by srun as one task

    # ---- files of a run
    model: str  # the name by which a finished training's weights are linked
    weights: str  # glob of those weights
    checkpoint: str  # glob of the file that a checkpoint's writing ends with
    observed_checkpoint = ""  # the same with --ogdm, where it is another
    samples = ""  # glob of the npz that sampling writes, where it is not samples.npz
    checkpoint_gb: float  # at the paper's size: network, EMA, two moments of Adam, and D with its own
    suffix = ""  # of a file with weights that `network` reads; empty: its own script alone samples them
    mark = b""  # in those files, where another backbone's have the same suffix
    takes_flags = False  # `network` heeds flags of its script: that file may not say all of the network
    reads_urls = False  # its scripts download a checkpoint that is an URL

    presets: tuple[Preset, ...] = ()  # of a codebase that is not in the paper

    # Flags that say where, or over how many processes, and nothing about the result; not in a job's key.
    not_in_key: frozenset[str]
    trainer_has_seed = True
    mirrors = False  # it mirrors images at random in training, so mirrored ones are real, too
    samples_in_one_process = False
    lacks: tuple[str, ...] = ()  # samplers of ours that its script has not

    # ---- commands ---------------------------------------------------------------------------------

    def home(self, third_party: Path) -> Path:
        """The codebase's folder."""
        return third_party / self.folder

    @abstractmethod
    def launcher(self, engine: Engine) -> tuple[str, ...]:
        """What starts the processes, up to the script. Its several nodes are those of the Slurm job around us."""

    def command(self, engine: Engine, script: str, flags: Mapping[str, Any], out: Path | None = None) -> Command:
        """A script of the codebase under its own launcher, in its folder."""
        home = self.home(engine.third_party)
        env = {"PYTHONPATH": python_path(home)}
        if engine.threads:
            env["OMP_NUM_THREADS"] = str(engine.threads)
        return Command(self.launcher(engine), script, flags, str(home), env | self.environment(out), self.joined)

    def environment(self, out: Path | None) -> dict[str, str]:
        """Variables of its own; `out` is the folder of the results."""
        return {}

    def train(
        self, preset: Preset, data: str, out: Path, init: str = "", seed: int | None = None,
        engine: Engine | None = None, more: Mapping[str, Any] | None = None,
    ) -> Command:  # fmt: skip
        """Trains a row of Table 5 into the folder `out`; flags in `more` replace its own."""
        engine = engine or Engine()
        if problems := engine.check(preset):
            raise ValueError(problems[0])
        flags = self.training(preset, engine, data, out, init, seed)
        if preset.ogdm:  # what Table 5 says of the method; the rest are defaults, which a recipe may change
            said = {"projection": preset.projection, "k": preset.k, "gamma": preset.gamma,
                    "d_kind": "paper" if preset.name in PRESETS else None}  # fmt: skip
            flags |= self.switch_on() | self.ogdm(**{name: v for name, v in said.items() if v is not None})
        return self.command(engine, self.script, flags | dict(more or {}), out)

    @abstractmethod
    def training(self, preset: Preset, engine: Engine, data: str, out: Path, init: str, seed: int | None) -> Flags:
        """The trainer's flags for a row of Table 5, without OGDM's."""

    def switch_on(self) -> Flags:
        """The flags that turn OGDM on."""
        return {"--ogdm": "True"}

    def ogdm(self, **settings: Any) -> Flags:
        """OGDM's settings in the backbone's own spelling."""
        return {f"--ogdm-{name.replace('_', '-')}": str(value) for name, value in settings.items()}

    def sample(
        self, preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int = 50_000,
        seed: int = 0, engine: Engine | None = None, more: Mapping[str, Any] | None = None,
    ) -> Command:  # fmt: skip
        """Samples a row's weights as Table 6 does, into the folder `out`."""
        script, flags = self.sampling(preset, model, out, sampler, nfe, images, seed)
        return self.command(self.sampling_engine(engine or Engine()), script, flags | dict(more or {}), out)

    def sampling_engine(self, engine: Engine) -> Engine:
        """The processes that sample."""
        return replace(engine, gpus=1, nodes=1) if self.samples_in_one_process else engine

    @abstractmethod
    def sampling(
        self, preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int, seed: int
    ) -> tuple[str, Flags]:
        """The sampling script and its flags."""

    def as_trained(self, command: Command) -> Command:
        """A row's command with the network that its weights were trained with, where a file beside them says so."""
        return command

    def network(self, weights: Path, third_party: Path, native: Sequence[str], device: str) -> "Network":
        """Trained weights, EMA where there is one, to be sampled in this process.

        native   flags of the sampling script that say what the network is, where the file does not
        """
        raise NotImplementedError

    def put_on_path(self, third_party: Path) -> None:
        """Makes the codebase's modules importable."""
        if (home := str(self.home(third_party).absolute())) not in sys.path:
            sys.path.insert(0, home)

    @abstractmethod
    def resumed(self, command: Command, folder: Path) -> Command | None:
        """A training's command from the last checkpoint in its folder, by native means; None if it is finished."""

    def steps_left(self, command: Command, folder: Path) -> int:
        """Steps that a training has not done though it ended well."""
        return 0

    # ---- what can be wrong before anything starts ---------------------------------------------------

    def not_ready(self, third_party: Path) -> str:
        """Why the codebase cannot be used, and what to do; empty if it can."""
        script = self.home(third_party) / self.script
        if not script.is_file():
            return f"{self.name}: there is no {script}; run/setup.sh {self.folder} fetches it"
        if "ogdm_core" not in script.read_text():
            return f"{self.name}: {self.home(third_party)} is not patched; run/setup.sh {self.folder} does that"
        return ""

    def check_training(self, preset: Preset, data: str, seed: int | None, engine: Engine) -> None:
        """Raises ValueError for flags of run/train.sh that this trainer cannot follow."""
        if not data:
            raise ValueError("--data: give the images to train on (run/prepare_data.sh makes them)")
        if seed is not None and not self.trainer_has_seed:
            raise ValueError(f"--seed: {self.folder}'s trainer has none; leave it out")

    def check_sampling(self, sampler: str) -> None:
        """Raises ValueError for a sampler that the sampling script lacks."""
        if sampler in self.lacks:
            raise ValueError(f"--sample: {self.folder}'s sampling script has no {sampler} sampler of ours")

    def check_checkpoint(self, path: str) -> str:
        """What is wrong with a file that somebody gives as this backbone's checkpoint; empty if nothing is."""
        return ""

    def missing_weights(self, preset: Preset, third_party: Path, init: str = "") -> str:
        """What a training needs beside its data and is not there; empty if nothing is."""
        return ""

    @abstractmethod
    def checkpoints_kept(self, preset: Preset) -> int:
        """How many checkpoints a training leaves."""

    # ---- data -------------------------------------------------------------------------------------

    def archive(self, name: str) -> str:
        """The file that it trains on, for images called `name`; empty if it reads the folder of images."""
        return ""

    def convert(self, images: Path, archive: Path, engine: Engine) -> Command:
        """Makes that file."""
        raise NotImplementedError

    # ---- small networks for the tables' CPU scales, and their shipped baselines -----------------------

    small_images: Mapping[str, tuple[int, int]]  # scale -> (batch, images): smoke, cpu (a baseline's)

    def small_training(self, scale: str, preset: Preset, init: str, size: int, rate: str) -> Flags:
        """Flags that replace the preset's, for images of this size."""
        raise NotImplementedError

    def small_sampling(self, scale: str, size: int, images: int) -> Flags:
        """The same for sampling."""
        raise NotImplementedError

    def stand_in_folder(self, folder: Path) -> Flags:
        """Flags that name the folder of a stand-in's images, where `training` does not."""
        return {}

    def config_files(self, flags: Mapping[str, Any]) -> list[str]:
        """Files of this repository among the flags' values, whose content a result depends on."""
        return []

    def pack(self, checkpoint: Path, third_party: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
        """The weights that a fine-tune starts from, and texts to keep beside them; for rows of the tables."""
        raise NotImplementedError

    def unpack(self, state: dict[str, "Tensor"], kept: dict[str, str], checkpoint: Path, third_party: Path) -> None:
        """Writes them back as the backbone's own kind of checkpoint."""
        raise NotImplementedError


class Torchrun(Backbone):
    """A codebase whose processes torchrun starts."""

    def launcher(self, engine: Engine) -> tuple[str, ...]:
        """torchrun; inside a job of Slurm on several nodes srun starts it on each, elsewhere people do."""
        if engine.nodes == 1:
            return (launch.beside("torchrun"), "--standalone", f"--nproc_per_node={engine.gpus}")
        nodes = launch.slurm_nodes()
        meet = engine.rendezvous or f"{launch.address(nodes[0]) if nodes else 'FIRST_NODE'}:29400"
        return (*launch.srun(engine, 1), launch.beside("torchrun"), f"--nnodes={engine.nodes}",
                f"--nproc_per_node={engine.per_node}", "--rdzv_backend=c10d", f"--rdzv_endpoint={meet}",
                "--rdzv_id=ogdm")  # fmt: skip

    def check_training(self, preset: Preset, data: str, seed: int | None, engine: Engine) -> None:
        super().check_training(preset, data, seed, engine)
        if engine.nodes > 1 and not (engine.rendezvous or launch.slurm_nodes()):
            raise ValueError("--nodes: outside of Slurm say where the nodes meet, --rendezvous HOST:29400, and run the "
                             "same command on each of them")  # fmt: skip


class Dnnlib(Torchrun):
    """NVlabs' EDM and EDM2, whose scripts and files are alike."""

    packages = ("click", "psutil")
    joined = True
    model = "model.pkl"
    weights = "network-snapshot-*.pkl"
    checkpoint = "training-state-*.pt"
    observed_checkpoint = "ogdm-state-*.pt"
    suffix = ".pkl"
    reads_urls = True
    lacks = ("stochastic",)
    generator: tuple[str, str]  # the sampling script, and its flag for the weights

    def sampling(
        self, preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int, seed: int
    ) -> tuple[str, Flags]:
        """It has one discretisation, and one seed per image."""
        script, network = self.generator
        return script, {
            network: model, "--outdir": f"{out}/images", "--subdirs": None,
            "--seeds": f"{seed * images}-{(seed + 1) * images - 1}", "--sampler": sampler, "--nfe": nfe,
            "--batch": 250, "--npz": f"{out}/samples.npz",
        }  # fmt: skip

    def small_sampling(self, scale: str, size: int, images: int) -> Flags:
        return {} if scale == "smoke" else {"--batch": 500}

    def network(self, weights: Path, third_party: Path, native: Sequence[str], device: str) -> "Network":
        """As the patched script samples: in double precision, and decoded by the snapshot's encoder if it has one."""
        import torch

        from ogdm_core.checkpoints import reading
        from run.sampling import Network

        pickle = self.pickle(third_party)
        from ogdm_core.denoiser import SIGMA_MAX, SIGMA_MIN, make_eps_fn
        from ogdm_core.schedule import KarrasVE

        with reading(weights, f"give a {self.weights}"), weights.open("rb") as file:
            snapshot = pickle.load(file)
            net, encoder = snapshot["ema"].to(device), snapshot.get("encoder")

        def eps_of(label: "Tensor | None") -> Any:
            return make_eps_fn(net, None if label is None else torch.eye(net.label_dim, device=device)[label])

        def decode(x: "Tensor") -> "Tensor":
            return encoder.decode(x) / 127.5 - 1 if encoder else x

        low, high = getattr(net, "sigma_min", 0), getattr(net, "sigma_max", SIGMA_MAX)
        schedule = KarrasVE(max(SIGMA_MIN, low), min(SIGMA_MAX, high))
        shape = (net.img_channels, net.img_resolution, net.img_resolution)
        return Network(schedule, shape, eps_of, device, net.label_dim, decode, torch.float64)

    def pickle(self, third_party: Path) -> Any:
        """A pickle module that knows upstream's classes and refuses code."""
        other = sys.modules.get("training")
        if other and Path(other.__path__[0]).parent.name != self.folder:
            raise ValueError("EDM's and EDM2's code share their modules' names; open their files by two commands")
        self.put_on_path(third_party)
        compat = import_module(f"ogdm_core.{self.name}.compat")
        compat.install()
        return compat.careful_pickle
