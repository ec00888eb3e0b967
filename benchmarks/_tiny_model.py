"""Models small enough to start anywhere."""

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
"""Used with random weights where there is no real model: then no weights have to be identified either."""

SMALL_LLAMA = TINY_LLAMA | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Where computing has to cost more than everything around it, as in service: 6 KiB of KV cache per token."""
