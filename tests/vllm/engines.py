"""The tests' side of ``engine_process``: start engines in other processes, talk to them, read their logs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 32
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "disable_log_stats": False,
    "seed": 0,
}


class EngineProcess:
    """One process that runs engines."""

    def __init__(
        self, log: Path, multiprocessing: bool = False, command: Sequence[str] = (), **environment: str
    ) -> None:
        """``multiprocessing``: scheduler and workers in processes of their own, as vLLM serves by default. ``command``:
        what to start the process with."""
        self.log = log
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PEGA", "PYTHONHASHSEED"))},
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocessing else "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            "PEGAFLOW_SHARE_DUMMY_WEIGHTS": "1",
            "PYTHONPATH": str(ROOT),
            **environment,
        }
        environ = {name: value for name, value in environ.items() if value}
        self._log_file = log.open("ab")
        self.process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.vllm.engine_process"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            start_new_session=True,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run a command; its error is an ``AssertionError`` here."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the engine process died: {self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{self.tail()}")
        return answer["answer"]

    def start(self, model: Path, pool: dict[str, Any] | None = None, role: str = "kv_both", **arguments: Any) -> None:
        """Start an engine for ``model``; ``pool``: the connector's options without prefix, ``None``: no connector."""
        if pool is not None:
            transfer = {**connector(pool, role), "kv_load_failure_policy": "recompute"}
            arguments = {"kv_transfer_config": transfer, **arguments}
        self.ask("open", **{**DEFAULTS, "model": str(model), **arguments})

    @contextmanager
    def engine(self, model: Path, pool: dict[str, Any] | None = None, **arguments: Any) -> Iterator["EngineProcess"]:
        """An engine that is stopped at the end."""
        try:
            self.start(model, pool, **arguments)
            yield self
        finally:
            if self.process.poll() is None:
                self.ask("close")

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, **sampling: Any) -> list[dict[str, Any]]:
        """``[{tokens, cached}]`` of each prompt."""
        answers: list[dict[str, Any]] = self.ask("generate", prompts=prompts, max_tokens=max_tokens, **sampling)
        return answers

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """End the process and all that it started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self._log_file.close()

    def kill(self) -> None:
        """kill -9 of the process and all that it started."""
        os.killpg(self.process.pid, 9)
        self.process.wait()


def connector(pool: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """vLLM's configuration of our connector with these options."""
    options = {f"pegaflow.{name}": value for name, value in pool.items()}
    return {"kv_connector": "PegaKVConnector", "kv_role": role, "kv_connector_extra_config": options}


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that differ for each seed from the first on."""
    return [(seed * 131 + index * (7 + seed)) % 500 + 3 for index in range(tokens)]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    """Only the generated tokens."""
    return [answer["tokens"] for answer in answers]


def cached_of(answers: list[dict[str, Any]]) -> list[int]:
    """Only the numbers of cached tokens."""
    return [answer["cached"] for answer in answers]
