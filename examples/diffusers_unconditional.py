"""diffusers' example of unconditional training, with OGDM: the added lines are marked "OGDM".

    python examples/diffusers_unconditional.py --data digits --output out/unconditional
    accelerate launch examples/diffusers_unconditional.py ...        several GPUs or processes

Writes a pipeline that plain diffusers loads (`DDIMPipeline.from_pretrained`), and samples in 10 steps.
`python -m ogdm_core.diffusers` is the same with checkpoints, class labels and more flags.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import DDIMPipeline, DDIMScheduler, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from diffusers.utils import make_image_grid
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ogdm_core import Observer, OGDMConfig  # OGDM
from ogdm_core.diffusers.model import schedule_of  # OGDM
from ogdm_core.images import load


def main(argv: list[str] | None = None) -> None:
    """Trains, then samples."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", default="digits", help="digits, mnist, an .npz or a folder (default: %(default)s)")
    p.add_argument("--output", type=Path, default=Path("out/unconditional"), help="(default: %(default)s)")
    p.add_argument("--epochs", type=int, default=60, help="(default: %(default)s)")
    p.add_argument("--batch-size", type=int, default=64, help="images per process and step (default: %(default)s)")
    p.add_argument("--learning-rate", type=float, default=1e-3, help="(default: %(default)s)")
    p.add_argument("--rho", type=float, default=OGDMConfig.rho, help="strength of OGDM (default: %(default)s)")
    args = p.parse_args(argv)

    accelerator = Accelerator()
    images = load(args.data)
    dataloader = DataLoader(range(len(images)), args.batch_size, shuffle=True, drop_last=len(images) > args.batch_size)
    model = UNet2DModel(
        sample_size=images.size,
        in_channels=images.channels,
        out_channels=images.channels,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 50, args.epochs * len(dataloader))
    ema_model = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4)
    model, optimizer, dataloader, lr_scheduler = accelerator.prepare(model, optimizer, dataloader, lr_scheduler)
    ema_model.to(accelerator.device)

    config = OGDMConfig(rho=args.rho, d_kind="light")  # OGDM
    schedule = schedule_of(noise_scheduler)  # OGDM
    steps = args.epochs * len(dataloader)  # OGDM
    observer = Observer(config, schedule, images.channels, images.size, device=accelerator.device, steps=steps)  # OGDM

    for epoch in range(args.epochs):
        for index in dataloader:
            clean_images = images.batch(index.cpu()).to(accelerator.device)
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(0, 1000, (len(clean_images),), device=accelerator.device)
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            model_output = model(noisy_images, timesteps).sample
            loss = F.mse_loss(model_output.float(), noise.float())
            t = timesteps + 1  # OGDM: diffusers counts from 0, where ours is the data
            emission = observer.observe(x_0=clean_images, eps=noise, x_t=noisy_images, t=t, eps_t=model_output)  # OGDM
            accelerator.backward(loss + emission.mean())  # OGDM: + emission.mean()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            observer.step(lr_scheduler.get_last_lr()[0] / args.learning_rate)  # OGDM
            lr_scheduler.step()
            optimizer.zero_grad()
            ema_model.step(model.parameters())
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}, gamma x emission {emission.mean().item():.4f}")

    if accelerator.is_main_process:
        unet = accelerator.unwrap_model(model)
        ema_model.copy_to(unet.parameters())
        pipeline = DDIMPipeline(unet, DDIMScheduler.from_config(noise_scheduler.config))
        pipeline.save_pretrained(args.output)
        generator = torch.Generator(accelerator.device).manual_seed(0)
        pictures = pipeline(batch_size=40, num_inference_steps=10, generator=generator).images
        make_image_grid(pictures, rows=4, cols=10, resize=32).save(args.output / "samples.png")
        print(f"wrote {args.output}: a pipeline, and samples.png in 10 steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
