"""Storms: vLLM's real schedulers and our real connector under random requests, with a model that is made up.

The model's "KV cache" is a function of the tokens, so every block that was loaded, found or recomputed can be compared
at the moment at which a model would read it. One process, no GPU, no weights; thousands of requests in seconds.
"""

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

if vllm.platforms.current_platform.device_type != "cpu":
    # vLLM's wheel for GPUs, on a machine without: it would refuse to be configured.
    vllm.platforms._current_platform = CpuPlatform()
