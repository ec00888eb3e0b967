"""Random models that are small enough to run anywhere, with the shapes that matter: attention kinds, not quality."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig

VOCABULARY = 512
WINDOW_TOKENS = 64
"""Sliding window of the hybrid model: two blocks of 32."""


def llama_config(layers: int = 3) -> LlamaConfig:
    """Full attention with grouped heads."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )


def gemma3_config() -> Gemma3TextConfig:
    """Five layers with a sliding window for one with full attention, as Gemma 3 has them."""
    layer_types = ["sliding_attention"] * 5 + ["full_attention"]
    return Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=layer_types,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def make_model(directory: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """Random weights in ``directory``; the same seed gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            # Wide enough that logits differ clearly: greedy output then does not hang on the last bit.
            torch.nn.init.normal_(parameter, std=0.2)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    return directory
