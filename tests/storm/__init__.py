"""Storms: vLLM's real schedulers and our real connector under random requests, with a model that is made up.

The model's "KV cache" is a function of the tokens, so every block that was loaded, found or recomputed can be compared
at the moment at which a model would read it. One process, no GPU, no weights; thousands of requests in seconds.
"""
