"""A LoRA of Stable Diffusion 3 or 3.5, a transformer trained by flow matching, with OGDM (its lines are marked).

    python examples/flow_matching_transformer.py --model MODEL --data IMAGES --output out/lora-sd3
    accelerate launch examples/flow_matching_transformer.py ...        several GPUs or processes

MODEL is a Stable Diffusion 3 pipeline, a folder or a hub name. IMAGES is a folder with a metadata.jsonl, one line
{"file_name": ..., "text": ...} per image. D sees latents and the text's pooled embedding. The network predicts the
velocity v = eps - x_0 of x_t = (1 - t) x_0 + t eps, so that eps = (x_t + (1 - t) v) / ((1 - t) + t).

Writes weights that plain diffusers loads (`pipeline.load_lora_weights(OUTPUT)`), and samples in 10 steps.
`--resume` continues from OUTPUT/checkpoint.pt, bit for bit on a CPU.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import StableDiffusion3Pipeline
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling
from diffusers.utils import make_image_grid
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

from ogdm_core import Observer, OGDMConfig, RectifiedFlow  # OGDM
from ogdm_core.cli import errors_in_one_line
from ogdm_core.files import atomic_write
from ogdm_core.images import Folder, batch_index
from ogdm_core.schedule import expand


def main(argv: list[str] | None = None) -> None:
    """Trains, then samples."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a Stable Diffusion 3 pipeline, a folder or a hub name")
    p.add_argument("--data", required=True, type=Path, help="a folder of images with metadata.jsonl")
    p.add_argument("--output", type=Path, default=Path("out/lora-sd3"), help="(default: %(default)s)")
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
    pipeline = StableDiffusion3Pipeline.from_pretrained(args.model, torch_dtype=weight_dtype)
    transformer, vae = pipeline.transformer, pipeline.vae

    for model in pipeline.components.values():
        if isinstance(model, torch.nn.Module):
            model.requires_grad_(False).to(device)
    target_modules = ["to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
    transformer.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=target_modules))
    cast_training_params(transformer, dtype=torch.float32)
    lora_layers = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(lora_layers, lr=args.learning_rate)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)

    config = OGDMConfig(rho=args.rho, d_kind=args.d_kind, seed=args.seed)  # OGDM
    schedule = RectifiedFlow(sigma_data=1.0)  # OGDM: latents are scaled to unit variance
    observer = Observer(  # OGDM: D's condition is the vector that the transformer is given
        config, schedule, transformer.config.in_channels, args.resolution // pipeline.vae_scale_factor,
        labels=transformer.config.pooled_projection_dim, device=device, steps=args.steps,
    )  # fmt: skip

    checkpoint, first_step = args.output / "checkpoint.pt", 0
    if args.resume:
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        set_peft_model_state_dict(transformer, state["lora"])
        optimizer.load_state_dict(state["optimizer"])
        lr_scheduler.load_state_dict(state["lr_scheduler"])
        observer.load_state_dict(state["observer"])  # OGDM
        first_step = state["step"]
    transformer, optimizer = accelerator.prepare(transformer, optimizer)
    transformer.train()

    for step in range(first_step, args.steps):
        set_seed(args.seed + step * accelerator.num_processes, device_specific=True)  # the same after --resume
        index = batch_index(
            len(images), args.batch_size, step, args.seed, accelerator.process_index, accelerator.num_processes
        )
        with torch.no_grad():
            pixels = images.batch(index).expand(-1, 3, -1, -1).to(device, weight_dtype)
            latents = vae.encode(pixels).latent_dist.sample().float()
            latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
            batch_texts = [texts[i] for i in index.tolist()]
            text, _, pooled_text, _ = pipeline.encode_prompt(
                batch_texts, None, None, device=device, do_classifier_free_guidance=False
            )

        noise = torch.randn_like(latents)
        t = compute_density_for_timestep_sampling("logit_normal", len(latents), 0.0, 1.0).to(device)
        noisy_latents = schedule.diffuse(latents, noise, t)
        model_pred = transformer(noisy_latents.to(weight_dtype), text, pooled_text, 1000 * t).sample.float()
        loss = (model_pred - (noise - latents)).square().flatten(1).mean(1)

        a, b = expand(schedule.a(t), latents), expand(schedule.b(t), latents)  # OGDM
        eps_t = (noisy_latents + a * model_pred) / (a + b)  # OGDM
        emission = observer.observe(  # OGDM
            x_0=latents, eps=noise, x_t=noisy_latents, t=t, eps_t=eps_t, label=pooled_text, transition=loss
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
            lora = get_peft_model_state_dict(accelerator.unwrap_model(transformer))
            StableDiffusion3Pipeline.save_lora_weights(args.output, lora)
            state = {"step": done, "lora": lora, "optimizer": optimizer.state_dict(),
                     "lr_scheduler": lr_scheduler.state_dict(), "observer": observer.state_dict()}  # fmt: skip
            with atomic_write(checkpoint) as file:
                torch.save(state, file)

    if main_process:
        pipeline.transformer = accelerator.unwrap_model(transformer).eval()
        generator = torch.Generator(device).manual_seed(0)
        size = {"height": args.resolution, "width": args.resolution, "num_images_per_prompt": 4}
        with torch.autocast(device.type, weight_dtype, enabled=weight_dtype != torch.float32):
            pictures = pipeline(args.prompt or texts[0], num_inference_steps=10, generator=generator, **size).images
        make_image_grid(pictures, rows=1, cols=4).save(args.output / "samples.png")
        print(f"wrote {args.output}: pytorch_lora_weights.safetensors, and samples.png in 10 steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
