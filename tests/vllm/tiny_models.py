"""Random models that are small enough to run anywhere, with the shapes that matter: attention kinds, not quality."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

VOCABULARY = 512
WINDOW_TOKENS = 64
"""Sliding window of the hybrid model: two blocks of 32."""
CHUNK_TOKENS = 128
"""Chunk of the model with chunked local attention: four blocks of 32."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


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


def deepseek_config() -> DeepseekV3Config:
    """Latent attention and experts, and a layer that predicts one more token. Blocks have 16 tokens on CPUs."""
    return DeepseekV3Config(
        **COMMON,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        topk_method="noaux_tc",
        num_nextn_predict_layers=1,
    )


def glm4_config() -> Glm4MoeConfig:
    """Full attention and experts, and a layer that predicts one more token."""
    return Glm4MoeConfig(
        **COMMON,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )


def qwen3_next_config() -> Qwen3NextConfig:
    """Three recurrent layers (gated delta nets) for one with full attention, experts, and a layer that predicts one
    more token. Heads are as wide as their kernels ask for; a state has the size of 66 tokens, so blocks have 96."""
    return Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def llama4_config() -> Llama4TextConfig:
    """Three layers with chunked local attention for one with full attention, and experts in every other layer."""
    return Llama4TextConfig(
        **{**COMMON, "intermediate_size": 64},
        intermediate_size_mlp=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=CHUNK_TOKENS,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1, 0],
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
    if config.model_type in ("deepseek_v3", "glm4_moe"):
        tensors = {**tensors, **_deepseek_drafter(tensors, config.num_hidden_layers)}
        tensors = dict(_experts_apart(tensors))
    elif config.model_type == "qwen3_next":
        tensors = {**tensors, **_qwen3_next_drafter(tensors, config.num_hidden_layers)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    return directory


def make_adapter(directory: Path, config: LlamaConfig, seed: int = 0, rank: int = 8) -> Path:
    """A LoRA adapter for queries and values with random weights; the same seed gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    head_size = config.head_dim
    heads = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module, count in heads.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for half, shape in (("A", (rank, config.hidden_size)), ("B", (count * head_size, rank))):
                weight = torch.randn(shape, generator=random) * 0.3
                tensors[f"{name}.lora_{half}.weight"] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(heads),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


Tensors = dict[str, torch.Tensor]


def _experts_apart(tensors: Tensors) -> Any:
    """Weights of each expert under a name of their own, as the model's authors published them."""
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        for expert, weights in enumerate(tensor if found else ()):
            assert found is not None
            parts = weights.chunk(2) if found[2] == "gate_up_proj" else (weights,)
            names = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
            for part, projection in zip(parts, names, strict=True):
                yield f"{found[1]}.{expert}.{projection}.weight", part.contiguous()
        if not found:
            yield name, tensor


def _mixer(tensors: Tensors) -> torch.Tensor:
    """Weights that bring an embedding and a hidden state together."""
    hidden = tensors["model.norm.weight"].shape[0]
    return torch.nn.init.normal_(torch.empty(hidden, 2 * hidden, dtype=torch.bfloat16), std=0.2)


def _deepseek_drafter(tensors: Tensors, layers: int) -> Tensors:
    """One more layer like the last one."""
    last, drafter = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    made = {name.replace(last, drafter): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    norm = tensors["model.norm.weight"]
    made |= {f"{drafter}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{drafter}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    made[f"{drafter}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    return {**made, f"{drafter}eh_proj.weight": _mixer(tensors)}


def _qwen3_next_drafter(tensors: Tensors, layers: int) -> Tensors:
    """A layer like the last one, which has full attention."""
    last = f"model.layers.{layers - 1}."
    made = {name.replace(last, "mtp.layers.0."): tensor.clone() for name, tensor in tensors.items() if last in name}
    norm = tensors["model.norm.weight"]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    made |= {f"mtp.{name}.weight": norm.clone() for name in norms}
    return {**made, "mtp.fc.weight": _mixer(tensors)}
