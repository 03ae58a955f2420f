"""Runs scripts of a clone of SiT, several times in one process.

    python sit_drive.py CLONE CASES.json

A case is [KIND, WORDS]: `train` and `sample` run a patched script with these words; `untouched` runs the main() of an
untouched train.py with these settings, on a CPU but with nothing else of ours; `checks` compares formulas and labels,
`opened` samples of a checkpoint by run/sampling.py with upstream's.
An error that ends a script is printed as REFUSED.
"""

import argparse
import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import torch

from ogdm_core.distributed import gather
from ogdm_core.sit import compat, train

USUAL = {
    "global_seed": 0, "num_workers": 0, "log_every": 1, "sample_every": 10_000, "cfg_scale": 4.0, "wandb": False,
    "ckpt": None, "path_type": "Linear", "prediction": "velocity", "loss_weight": None, "sample_eps": None,
    "train_eps": None,
}  # fmt: skip


def untouched(clone: str, settings: dict) -> None:
    """main() of the source as it is, but for the names of the device, the autoencoder and torch.cuda."""
    source = Path(clone, "train.py").read_text()
    shim = "import torch\nfrom ogdm_core.sit import compat\ntorch = compat.cuda_or_not(torch)"
    source = re.sub(r"^import torch$", shim, source, count=1, flags=re.M)
    source = re.sub(r"^(\s+)device = rank .*$", r"\1device = torch.device('cpu')", source, flags=re.M)
    source = source.replace("AutoencoderKL.from", "compat.autoencoder.from")
    sizes = settings.pop("sizes")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        main = runpy.run_path(file.name, run_name="upstream")["main"]
    compat.resize(sizes)
    main(argparse.Namespace(**USUAL | settings))


def checks() -> None:
    """eps of exact outputs is the noise; D is told the label that the network saw."""
    import models
    from transport import create_transport

    torch.manual_seed(0)
    x_1, K = torch.randn(16, 4, 8, 8), 5
    for path, prediction in [(p, q) for p in ("Linear", "GVP") for q in ("velocity", "noise", "score")]:
        transport, schedule = create_transport(path, prediction), train.schedule_of(path)
        for own in (None, 0.05):
            edge = train.edge_of(argparse.Namespace(prediction=prediction, train_eps=own))
            assert create_transport(path, prediction, train_eps=own).train_eps == edge
        time, noise, _ = transport.sample(x_1)
        time = time.clamp(0.01, 0.99)
        _, x_t, v = transport.path_sampler.plan(time, noise, x_1)
        b = transport.path_sampler.compute_sigma_t(time)[0].reshape(-1, 1, 1, 1)
        exact = {"velocity": v, "noise": noise, "score": -noise / b}[prediction]
        t = 1 - time
        torch.testing.assert_close(schedule.diffuse(x_1, noise, t), x_t, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(train.to_eps(exact, x_t, t, schedule, prediction), noise, atol=1e-4, rtol=1e-4)

        model = models.SiT(input_size=8, patch_size=2, hidden_size=24, depth=1, num_heads=2, num_classes=K,
                           class_dropout_prob=0.5).train()  # fmt: skip
        ours = {"init": None, "latents": None, "lr": None, "ema": None, "ogdm": True, "ogdm_d_width": 0.02}
        args = argparse.Namespace(ckpt=None, path_type=path, prediction=prediction, num_classes=K, image_size=64,
                                  epochs=1, train_eps=None, global_batch_size=16, **ours)  # fmt: skip
        run = train.Run(args, None)
        assert vars(args).keys() & {"ogdm", "ogdm_d_width", "init"} == set()
        run.steps = 1
        run.observe(model, transport)
        told, observe = {}, run.observer.observe

        def spy(told=told, observe=observe, **given):
            told.update(given)
            return observe(**given)

        run.observer.observe = spy
        y = torch.randint(K, (16,))
        transport.training_losses(model, x_1, {"y": y})
        dropped = told["label"].sum(1) == 0
        assert torch.equal(told["label"].argmax(1)[~dropped], y[~dropped]) and 0 < int(dropped.sum()) < 16
        assert torch.equal(run.labels == K, dropped) and bool(run.emission.isfinite().all())
        again = told["eps_fn"](told["x_t"], told["t"], told["cond"])
        assert again.shape == x_1.shape
        run.average(model)
        model.y_embedder(torch.tensor([3, 5, 7, 999, 1000]), False)
        assert run.labels.tolist() == [3, 5, 2, 4, 5]
    wide = models.SiT(input_size=8, patch_size=2, hidden_size=384, depth=1, num_heads=2, num_classes=K)
    compat.load(wide, compat.weights(wide.state_dict()), "FILE", "other flags")


def opened(clone: str, file: str) -> None:
    """A checkpoint as run/solvers.sh opens it gives upstream's images, for the same noise and labels."""
    import models
    from transport import Sampler, create_transport

    from run.sampling import open_network

    network = open_network(Path(file), "cpu", third_party=Path(clone).parent)
    noise = torch.randn((12, *network.shape), generator=torch.Generator().manual_seed(0))
    state = compat.checkpoint(file)
    own = models.SiT(input_size=8, num_classes=10, depth=2, hidden_size=24, num_heads=2)
    own.load_state_dict(state["ema"])
    with torch.no_grad():
        euler = Sampler(create_transport()).sample_ode(sampling_method="euler", num_steps=9)
        z = euler(noise, own.eval().forward, y=torch.arange(12) % 10)[-1]
        vae = compat.autoencoder.from_pretrained(f"stabilityai/sd-vae-ft-{state['args'].vae}")
        theirs = vae.decode(z / 0.18215).sample.clamp(-1, 1)
    torch.testing.assert_close(network.draw(noise, "euler", 8), theirs, atol=5e-3, rtol=1e-3)


def main(clone: str, cases: str) -> None:
    """All cases of a JSON file, in order."""
    sys.path.insert(0, clone)
    compat.install()
    if int(os.environ["WORLD_SIZE"]) > 1:
        step = train.Run.step

        def step_and_compare(self):
            loss = step(self)
            sums = gather([float(p.double().sum()) for p in [*self.observer.D.parameters(), *self.model.parameters()]])
            assert all(found == sums[0] for found in sums), "the ranks differ"
            return loss

        train.Run.step = step_and_compare
    for kind, words in json.loads(Path(cases).read_text()):
        try:
            if kind == "checks":
                checks()
            elif kind in ("untouched", "opened"):
                globals()[kind](clone, words)
            else:
                script = {"train": "train.py", "sample": "sample_ddp.py"}[kind]
                sys.argv = [script, *words]
                runpy.run_path(str(Path(clone, script)), run_name="__main__")
        except SystemExit as error:
            print(f"REFUSED {error.code}", flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
