"""A LoRA of Stable Diffusion 1 or 2 (a `UNet2DConditionModel`), with OGDM: the added lines are marked "OGDM".

    python examples/text_to_image_lora.py --model MODEL --data IMAGES --output out/lora
    accelerate launch examples/text_to_image_lora.py ...        several GPUs or processes

MODEL is a Stable Diffusion pipeline, a folder or a hub name, that predicts epsilon or v. IMAGES is a folder with a
metadata.jsonl, one line {"file_name": ..., "text": ...} per image. D sees latents and the pooled embedding of the text.

Writes weights that plain diffusers loads (`pipeline.load_lora_weights(OUTPUT)`), and samples in 10 steps.
`--resume` continues from OUTPUT/checkpoint.pt, bit for bit on a CPU.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDIMScheduler, DDPMScheduler, StableDiffusionPipeline
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers, make_image_grid
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn import functional as F

from ogdm_core import Observer, OGDMConfig  # OGDM
from ogdm_core.cli import errors_in_one_line
from ogdm_core.diffusers.model import schedule_of, to_eps  # OGDM
from ogdm_core.files import atomic_write
from ogdm_core.images import Folder, batch_index


def main(argv: list[str] | None = None) -> None:
    """Trains, then samples."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a Stable Diffusion pipeline, a folder or a hub name")
    p.add_argument("--data", required=True, type=Path, help="a folder of images with metadata.jsonl")
    p.add_argument("--output", type=Path, default=Path("out/lora"), help="(default: %(default)s)")
    p.add_argument("--resolution", type=int, default=512, help="of the images (default: %(default)s)")
    p.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    p.add_argument("--batch-size", type=int, default=4, help="images per process and step (default: %(default)s)")
    p.add_argument("--learning-rate", type=float, default=1e-4, help="(default: %(default)s)")
    p.add_argument("--rank", type=int, default=8, help="of the LoRA (default: %(default)s)")
    p.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"), default="no", help="(default: %(default)s)")
    p.add_argument("--save-every", type=int, default=500, help="steps between checkpoints (default: %(default)s)")
    p.add_argument("--resume", action="store_true", help="continue from OUTPUT/checkpoint.pt")
    p.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    p.add_argument("--prompt", help="what to sample at the end (default: the first image's text)")
    p.add_argument("--rho", type=float, default=OGDMConfig.rho, help="strength of OGDM (default: %(default)s)")
    p.add_argument("--d-kind", choices=("paper", "light"), default="light", help="of OGDM (default: %(default)s)")
    args = p.parse_args(argv)

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    device, main_process = accelerator.device, accelerator.is_main_process
    with errors_in_one_line():
        images = Folder(args.data, args.resolution)
        texts = images.texts()
    set_seed(args.seed)
    # The frozen weights may be in half precision; the LoRA is in full.
    weight_dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.mixed_precision]
    pipeline = StableDiffusionPipeline.from_pretrained(args.model, torch_dtype=weight_dtype)
    unet, vae, text_encoder, tokenizer = pipeline.unet, pipeline.vae, pipeline.text_encoder, pipeline.tokenizer
    noise_scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    prediction_type = noise_scheduler.config.prediction_type

    for model in (unet, vae, text_encoder):
        model.requires_grad_(False).to(device)
    target_modules = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=target_modules))
    cast_training_params(unet, dtype=torch.float32)
    lora_layers = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(lora_layers, lr=args.learning_rate)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)

    config = OGDMConfig(rho=args.rho, d_kind=args.d_kind, seed=args.seed)  # OGDM
    schedule = schedule_of(noise_scheduler, sigma_data=1.0)  # OGDM: latents are scaled to unit variance
    observer = Observer(  # OGDM: D's condition is a vector of the text encoder's width
        config, schedule, unet.config.in_channels, args.resolution // pipeline.vae_scale_factor,
        labels=text_encoder.config.hidden_size, device=device, steps=args.steps,
    )  # fmt: skip

    checkpoint, first_step = args.output / "checkpoint.pt", 0
    if args.resume:
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        set_peft_model_state_dict(unet, state["lora"])
        optimizer.load_state_dict(state["optimizer"])
        lr_scheduler.load_state_dict(state["lr_scheduler"])
        observer.load_state_dict(state["observer"])  # OGDM
        first_step = state["step"]
    unet, optimizer = accelerator.prepare(unet, optimizer)
    unet.train()

    for step in range(first_step, args.steps):
        set_seed(args.seed + step * accelerator.num_processes, device_specific=True)  # the same after --resume
        index = batch_index(
            len(images), args.batch_size, step, args.seed, accelerator.process_index, accelerator.num_processes
        )
        with torch.no_grad():
            pixels = images.batch(index).expand(-1, 3, -1, -1).to(device, weight_dtype)
            latents = vae.encode(pixels).latent_dist.sample().float() * vae.config.scaling_factor
            batch_texts = [texts[i] for i in index.tolist()]
            tokens = tokenizer(batch_texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
            text = text_encoder(tokens.to(device))

        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),), device=device)
        noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
        velocity = noise_scheduler.get_velocity(latents, noise, timesteps)
        target = velocity if prediction_type == "v_prediction" else noise
        model_pred = unet(noisy_latents.to(weight_dtype), timesteps, text.last_hidden_state).sample.float()
        loss = F.mse_loss(model_pred, target, reduction="none").flatten(1).mean(1)

        t = timesteps + 1  # OGDM: diffusers counts from 0, where ours is the data
        eps_t = to_eps(model_pred, noisy_latents, t, schedule, prediction_type)  # OGDM
        emission = observer.observe(  # OGDM
            x_0=latents, eps=noise, x_t=noisy_latents, t=t, eps_t=eps_t, label=text.pooler_output, transition=loss
        )
        accelerator.backward((loss + emission).mean())  # OGDM: + emission
        accelerator.clip_grad_norm_(lora_layers, 1.0)
        optimizer.step()
        observer.step(lr_scheduler.get_last_lr()[0] / args.learning_rate)  # OGDM
        lr_scheduler.step()
        optimizer.zero_grad()

        done = step + 1
        if done % 50 == 0 or done == args.steps:
            accelerator.print(f"step {done}: loss {loss.mean():.4f}, gamma x emission {emission.mean():.5f}")
        if main_process and (done % args.save_every == 0 or done == args.steps):
            lora = get_peft_model_state_dict(accelerator.unwrap_model(unet))
            StableDiffusionPipeline.save_lora_weights(args.output, convert_state_dict_to_diffusers(lora))
            state = {"step": done, "lora": lora, "optimizer": optimizer.state_dict(),
                     "lr_scheduler": lr_scheduler.state_dict(), "observer": observer.state_dict()}  # fmt: skip
            with atomic_write(checkpoint) as file:
                torch.save(state, file)

    if main_process:
        pipeline.unet = accelerator.unwrap_model(unet).eval()
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
        generator = torch.Generator(device).manual_seed(0)
        size = {"height": args.resolution, "width": args.resolution, "num_images_per_prompt": 4}
        with torch.autocast(device.type, weight_dtype, enabled=weight_dtype != torch.float32):
            pictures = pipeline(args.prompt or texts[0], num_inference_steps=10, generator=generator, **size).images
        make_image_grid(pictures, rows=1, cols=4).save(args.output / "samples.png")
        print(f"wrote {args.output}: pytorch_lora_weights.safetensors, and samples.png in 10 steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
