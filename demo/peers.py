"""``python -m demo.peers``: two hosts, two pools, one prompt computed once. Real vLLM on the CPU; needs root."""

import contextlib
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from demo import command
from demo.engine import CORES, Answer, Engine, EngineError
from demo.report import COLD, Row
from demo.two_hosts import MadeUpHost, two_hosts

POOL_SIZE = "2gb"
BLOCK_TOKENS = 32
PORT = 7441
TOKENS = 32
SETTLE_SECONDS = 4
LEFT_ALONE_SECONDS = 31
"""A peer that is not to be had is asked again within half a minute."""

WAIT_SECONDS = 300


@dataclass
class PeersDemo:
    """What is shown, in order. Requests overlap only where prefill and decode are apart."""

    model: str
    text: str
    logs: Path
    console: Console
    rows: list[Row] = field(default_factory=list)
    prompt_tokens: int = 0

    def run(self) -> list[Row]:
        """Run everything and return the rows; an ``EngineError`` ends it early."""
        with two_hosts() as (a, b), contextlib.ExitStack() as engines:
            token = secrets.token_hex(32)
            serves = {"peer_listen": f"{a.address}:{PORT}", "pd_tail_save": True}
            asks = {"peers": f"{a.address}:{PORT}", "pd_tail_load": True, "wait_for_full_prefix": True}
            asks["wait_for_full_prefix_seconds"] = WAIT_SECONDS
            first, second = self._start(engines, token, {"a": (a, serves), "b": (b, asks)})
            cold = self._ask(first, self.text)
            self._add(COLD, cold, cold.text, must_hit=False)
            expected = self._warm_text(first, self.text)
            self._add("host B: from the pool of host A", self._ask(second, self.text), expected)
            second.reset()
            self._add("host B again: from its own pool", self._ask(second, self.text), expected)
            self._say("host B gets a new text first and waits; host A computes it")
            text = self.text[len(self.text) // 3 :]
            waiting: list[Answer] = []
            decode = threading.Thread(target=lambda: waiting.append(second.ask(text, TOKENS)))
            decode.start()
            first.ask(text, TOKENS)
            decode.join()
            if not waiting:
                raise EngineError(f"engine b did not answer, see {second.log}")
            self._add("host B waits while host A computes", waiting[0], self._warm_text(first, text))
            self._say(f"kill -9 of the whole engine on host A: {first.kill()} processes; another starts there")
            (third,) = self._start(engines, token, {"a-again": (a, serves)})
            second.reset()
            text = "After that, " + self.text[len(self.text) // 2 :]
            self._ask(third, text)
            expected = self._warm_text(third, text)
            self._say(f"host B, which had found nobody there, asks host A again within {LEFT_ALONE_SECONDS} s")
            time.sleep(LEFT_ALONE_SECONDS)
            self._add("host B: from host A, whose first engine is dead", self._ask(second, text), expected)
        return self.rows

    @staticmethod
    def _warm_text(engine: Engine, text: str) -> str:
        """The text with vLLM's own prefix cache, which ``engine`` has by now: behind a cached prefix the rest is
        computed in other portions than in a whole prompt, and rounding may change a word, whatever the cache is."""
        return engine.ask(text, TOKENS).text

    def _start(
        self, engines: contextlib.ExitStack, token: str, wanted: dict[str, tuple[MadeUpHost, dict[str, Any]]]
    ) -> list[Engine]:
        self._say(f"starting vLLM: engines {' and '.join(wanted)} (one to two minutes)")
        started = []
        for name, (host, options) in wanted.items():
            settings = self._settings(host, options)
            environment = {"PEGAFLOW_PEER_TOKEN": token, "VLLM_HOST_IP": "127.0.0.1"}
            environment[CORES] = ",".join(map(str, host.cores))
            engine = Engine(f"peers-{name}", settings, self.logs, command=host.command, environment=environment)
            started.append(engines.enter_context(engine))
        for engine in started:
            engine.wait_ready()
        time.sleep(SETTLE_SECONDS)
        return started

    def _settings(self, host: MadeUpHost, options: dict[str, Any]) -> dict[str, Any]:
        given = {"pool_size": POOL_SIZE, "shm_dir": str(host.shm_dir), "nics": "none", **options}
        return {
            "model": self.model,
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "max_model_len": -1,
            "max_num_seqs": 4,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_transfer_config": {
                "kv_connector": "PegaKVConnector",
                "kv_connector_module_path": "pegaflow.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {f"pegaflow.{name}": value for name, value in given.items()},
            },
        }

    def _ask(self, engine: Engine, text: str) -> Answer:
        self._say(f"engine {engine.name} reads and continues the text")
        return engine.ask(text, TOKENS)

    def _add(self, scenario: str, answer: Answer, text: str, *, must_hit: bool = True) -> None:
        self.prompt_tokens = max(self.prompt_tokens, answer.prompt_tokens)
        self.rows.append(Row(scenario, answer.ttft_s, answer.cached_tokens, answer.text == text, must_hit))
        self._say(
            f"{scenario}: first token after {answer.ttft_s:.3f} s, {answer.cached_tokens:,} tokens from the cache"
        )

    def _say(self, what: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {what}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(command.run("Two hosts share blocks, under real vLLM on the CPU.", "demo-peers.json", PeersDemo))
