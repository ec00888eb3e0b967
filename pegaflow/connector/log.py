"""The connector's logger.

vLLM gives handlers and a level to its own tree of loggers only; below it our lines look like all others of the engine
and follow ``VLLM_LOGGING_LEVEL``.
"""

import logging

logger = logging.getLogger("vllm.pegaflow")
