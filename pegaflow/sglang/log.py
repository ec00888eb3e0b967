"""The backend's logger. SGLang configures the root logger, so its lines look like all others of the engine."""

import logging

logger = logging.getLogger("sglang.pegaflow")
