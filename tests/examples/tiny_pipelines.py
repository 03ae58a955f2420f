"""Stable Diffusion and Stable Diffusion 3 in a few thousand weights each, and captioned images of 16 pixels."""

import json
import string

import numpy as np
import torch
from PIL import Image

TEXTS = ["a red thing", "green", "the third one", "blue as the sky", "a dark one", "no 6"]


def captioned_images(folder):
    """Six images and their metadata.jsonl; returns the folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = [{"file_name": f"{i}.png", "text": text} for i, text in enumerate(TEXTS)]
    for row in rows:
        Image.fromarray(rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)).save(folder / row["file_name"])
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tokenizer():
    """CLIP's, with a token per letter."""
    from transformers import CLIPTokenizer

    letters = string.ascii_lowercase + string.digits
    tokens = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({token: i for i, token in enumerate(tokens)}, [], model_max_length=12)


def text_encoder(words, projected=False):
    """CLIP's text model of width 16; with a projection of its pooled output for SD3."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=12, projection_dim=16, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def t5():
    """(T5's encoder of width 32, its tokenizer, with a token per letter)."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase, *string.digits]
    config = T5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5EncoderModel(config), T5Tokenizer([(piece, -1.0) for piece in pieces], extra_ids=0)


def vae(latents):
    """An autoencoder to latents of half the size."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=latents, norm_num_groups=4, sample_size=16, shift_factor=0.06,
    )  # fmt: skip


def stable_diffusion(folder, prediction_type):
    """Saves a pipeline like those of the hub; returns its folder."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    words = tokenizer()
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scheduler = PNDMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, skip_prk_steps=True, set_alpha_to_one=False,
        steps_offset=1, prediction_type=prediction_type,
    )  # fmt: skip
    parts = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipeline = StableDiffusionPipeline(vae(4), text_encoder(words), words, unet, scheduler, **parts)
    pipeline.save_pretrained(folder)
    return folder


def stable_diffusion_3(folder):
    """Saves a pipeline like those of the hub; returns its folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.manual_seed(0)
    words = tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32,
        pos_embed_max_size=8,
    )  # fmt: skip
    first, second = (text_encoder(words, projected=True) for _ in range(2))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = (transformer, scheduler, vae(4), first, words, second, tokenizer(), *t5())
    StableDiffusion3Pipeline(*parts).save_pretrained(folder)
    return folder
