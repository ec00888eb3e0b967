"""What does the connector do for real vLLM on a GPU, beside vLLM's own means and the original PegaFlow?"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._tiny_model import TINY_LLAMA
from benchmarks._vllm_report import Run, table

CHILD = Path(__file__).with_name("_vllm_child.py")
PD_CHILD = Path(__file__).with_name("_vllm_pd_child.py")
SHM_DIR = Path("/dev/shm")
IN_ONE_ENGINE = ("ttft", "save", "itl", "unique")
SCENARIOS = (*IN_ONE_ENGINE, "start", "successor", "pd")
CONNECTORS = ("none", "apc", "offloading", "ours", "nixl", "original")
PD_CONNECTORS = ("none", "ours", "nixl")
"""Of ``pd``: the decode side computes the prompt, finds it in the pool, or gets it from the prefill side."""
COMPILED = ("itl", "unique")
PD_SHARE = 0.8
"""Of the memory that one engine would take: two have to fit."""
STARTS = 2
"""Of each kind, in turns."""
SERVER_SECONDS_MAX = 120.0
SERVER_READY = "server listening"
POLL_SECONDS = 0.05
GB = 10**9

TINY_MODEL = {**TINY_LLAMA, "max_position_embeddings": 4096}
TINY_SIZES = {
    "prompts": 3,
    "input_tokens": 256,
    "output_tokens": 4,
    "streams": 2,
    "stream_tokens": 16,
    "unique_prompts": 6,
    "unique_input_tokens": 128,
    "unique_output_tokens": 4,
    "fill_prompts": 4,
    "settle_s": 1.0,
}
TINY_POOL_GB = 0.25


class RunFailed(Exception):
    """An engine did not do what it was started for; the message says why in a line."""


@dataclass(frozen=True)
class Setting:
    """One engine that is to be started."""

    scenario: str
    connector: str
    block_tokens: int
    compiled: bool
    place: Path
    """For the pool, in shared memory."""


class Bench:
    """All runs with the same options."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._started = 0
        self._deadline = time.monotonic() + options.minutes_max * 60
        self.runs: list[Run] = []

    def run(self) -> None:
        """Everything that was asked for; what fails is a line of the table."""
        for block in self._options.block_sizes:
            for names, connector in self._engines():
                self._try(names, connector, block, lambda n=names, c=connector, b=block: self._together(n, c, b))
            for connector in self._options.connectors:
                for name in ("start", "successor"):
                    if name in self._options.scenarios and connector not in ("none", "apc", "nixl"):
                        method = getattr(self, f"_{name}")
                        self._try([name], connector, block, lambda m=method, c=connector, b=block: m(c, b))
                if "pd" in self._options.scenarios and connector in PD_CONNECTORS:
                    self._try(["pd"], connector, block, lambda c=connector, b=block: self._pd(c, b))

    def _engines(self) -> Iterator[tuple[list[str], str]]:
        """Scenarios that share an engine, and its connector."""
        for connector in self._options.connectors:
            if connector == "nixl":
                continue
            wanted = [name for name in IN_ONE_ENGINE if name in self._options.scenarios]
            for compiled in (False, True):
                names = [name for name in wanted if self._compiled(name) == compiled]
                if names:
                    yield names, connector

    def _compiled(self, scenario: str) -> bool:
        chosen: bool | None = self._options.compile
        return scenario in COMPILED if chosen is None else chosen

    def _try(self, scenarios: Sequence[str], connector: str, block: int, function: Any) -> None:
        before = len(self.runs)
        try:
            if time.monotonic() > self._deadline:
                raise RunFailed("not started: --minutes-max is over")
            function()
        except RunFailed as error:
            self.runs += [Run(name, connector, block, error=str(error)) for name in scenarios]
        for run in self.runs[before:]:
            for row in run.rows or [{"error": run.error}]:
                print(json.dumps({"scenario": run.scenario, "connector": connector, "block": block, **row}), flush=True)
        self._options.out.parent.mkdir(parents=True, exist_ok=True)
        self._options.out.write_text(json.dumps([vars(run) for run in self.runs], indent=1) + "\n")

    # -- scenarios ----------------------------------------------------------------------------------------------------

    def _together(self, names: list[str], connector: str, block: int) -> None:
        with self._setting(names[0], connector, block) as setting:
            answer = self._child(setting, names)
        for name in names:
            self.runs.append(Run(name, connector, block, answer[name]))

    def _start(self, connector: str, block: int) -> None:
        """Seconds until an engine is there: without a connector, and with one that finds a full pool."""
        with self._setting("start", connector, block) as setting, self._setting("start", "none", block) as plain:
            filled = self._child(setting, ["fill"])
            rows: list[dict[str, Any]] = [{**row, "what": "filling the pool: first token"} for row in filled["fill"]]
            for number in range(STARTS):
                for name, one in (("no connector", plain), ("full pool", setting)):
                    answer = self._child(one, ["warm"])
                    what = f"engine start, {name}, {number + 1}"
                    rows.append({"what": what, "unit": "s", "mean": answer["start_s"], "n": 1})
                    rows[-1]["import s"] = answer["import_s"]
                    rows[-1]["first token ms"] = answer["warm"][0]["mean"]
        self.runs.append(Run("start", connector, block, rows))

    def _successor(self, connector: str, block: int) -> None:
        """An engine is killed; the next one is asked for the same prompts at once."""
        with self._setting("successor", connector, block) as setting:
            first = self._child(setting, ["fill"], kill=True)
            second = self._child(setting, ["warm"])
        rows = [*first["fill"], *second["warm"]]
        rows.append({"what": "engine start, after kill -9", "unit": "s", "mean": second["start_s"], "n": 1})
        self.runs.append(Run("successor", connector, block, rows))

    def _pd(self, connector: str, block: int) -> None:
        """One engine computes prompts, another one on the same GPU goes on from there."""
        with self._setting("pd", connector, block) as setting:
            answer = self._child(setting, ["pd"], program=PD_CHILD)
        self.runs.append(Run("pd", connector, block, answer["pd"]))

    # -- engines ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _setting(self, scenario: str, connector: str, block: int) -> Iterator[Setting]:
        """What an engine needs beside it: a place for its pool, and the server of the original."""
        with ExitStack() as stack:
            name = tempfile.mkdtemp(prefix="pegaflow-bench-", dir=SHM_DIR)
            stack.callback(shutil.rmtree, name, ignore_errors=True)
            if connector == "original":
                stack.enter_context(self._server())
            yield Setting(scenario, connector, block, self._compiled(scenario), Path(name))

    def _child(
        self, setting: Setting, scenarios: list[str], *, kill: bool = False, program: Path | None = None
    ) -> dict[str, Any]:
        """Start an engine, wait for its answer, and end it: in good order, or by ``kill`` -9."""
        self._started += 1
        name = f"{self._started:02}-{setting.scenario}-{setting.connector}-{setting.block_tokens}"
        log, result, settings = (self._scratch / f"{name}.{kind}" for kind in ("log", "json", "settings"))
        if program is None:
            more = {"transfer": self._transfer(setting), "scenarios": scenarios, "sizes": self._sizes(), "hold": kill}
        else:
            more = self._pd_settings(setting)
        settings.write_text(
            json.dumps({"engine": self._engine_arguments(setting), "result": str(result), **more}, indent=1)
        )
        print(f"{name}: {' '.join(scenarios)}, log {log}", file=sys.stderr, flush=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, program or CHILD, settings],
                env=self._environment(setting),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + self._options.seconds_max
            while process.poll() is None and not (kill and result.exists()):
                if time.monotonic() > deadline:
                    if result.exists():
                        break  # everything was measured; it only does not end
                    raise RunFailed(f"took more than {self._options.seconds_max} s: {log}")
                time.sleep(POLL_SECONDS)
        finally:
            end_session(process)
        if not result.exists():
            raise RunFailed(f"ended with {process.returncode}: {last_line(log)}")
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer

    def _engine_arguments(self, setting: Setting) -> dict[str, Any]:
        options = self._options
        longest = max(options.input_tokens + options.output_tokens, options.unique_input_tokens, options.stream_tokens)
        return {
            "model": str(options.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "block_size": setting.block_tokens,
            "max_model_len": (longest // 1024 + 2) * 1024,
            "max_num_batched_tokens": options.batched_tokens,
            "enforce_eager": not setting.compiled,
            "gpu_memory_utilization": options.gpu_memory * (PD_SHARE if setting.scenario == "pd" else 1),
            "enable_prefix_caching": setting.connector == "apc",
            "tensor_parallel_size": options.tensor_parallel,
            "seed": 0,
            **options.engine,
        }

    def _transfer(self, setting: Setting) -> dict[str, Any] | None:
        pool_bytes = int(self._options.pool_gb * GB)
        if setting.connector in ("none", "apc"):
            return None
        if setting.connector == "nixl":
            return {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        if setting.connector == "offloading":
            extra: dict[str, Any] = {"cpu_bytes_to_use": pool_bytes}
            return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        extra = {}
        if setting.connector == "ours":
            extra = {"pegaflow.shm_dir": str(setting.place), "pegaflow.pool_size": pool_bytes, **self._options.extra}
        return {
            "kv_connector": "PegaKVConnector",
            "kv_connector_module_path": "pegaflow.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def _pd_settings(self, setting: Setting) -> dict[str, Any]:
        """Of both sides; a prompt need not end with a block."""
        prefill, decode = self._transfer(setting), self._transfer(setting)
        if setting.connector == "ours" and prefill and decode:
            prefill["kv_role"], decode["kv_role"] = "kv_producer", "kv_consumer"
            prefill["kv_connector_extra_config"].update({"pegaflow.pd_tail_save": True})
            decode["kv_connector_extra_config"].update(
                {"pegaflow.pd_tail_load": True, "pegaflow.wait_for_full_prefix": True}
            )
        names = ("prompts", "input_tokens", "output_tokens", "seed", "vocabulary")
        sizes = {name: value for name, value in self._sizes().items() if name in names}
        ways = {"nixl": setting.connector == "nixl", "at_once": setting.connector == "ours"}
        return {"prefill": prefill, "decode": decode, "sizes": sizes, **ways}

    def _sizes(self) -> dict[str, Any]:
        config = json.loads((self._options.model / "config.json").read_text())
        names = (
            "prompts input_tokens output_tokens streams stream_tokens unique_prompts unique_input_tokens "
            "unique_output_tokens unique_rounds fill_prompts rate settle_s seed"
        )
        sizes = {name: getattr(self._options, name) for name in names.split()}
        save_input_tokens = min(self._options.input_tokens, self._options.batched_tokens)
        return {**sizes, "vocabulary": config["vocab_size"], "save_input_tokens": save_input_tokens}

    def _environment(self, setting: Setting) -> dict[str, str]:
        return environment({"ours": self._options.ours, "original": self._options.original}.get(setting.connector))

    @contextmanager
    def _server(self) -> Iterator[None]:
        log = self._scratch / f"server-{self._started:02}.log"
        setting = Setting("server", "original", 0, False, self._scratch)
        with original_server(self._options.original, self._options.pool_gb, log, self._environment(setting)):
            yield


def environment(home: Path | None) -> dict[str, str]:
    """Of an engine. ``home`` holds its ``pegaflow``, ours or the original; neither is found by accident beside the
    program."""
    paths = [str(home)] if home else []
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PEGAFLOW_SHARE_DUMMY_WEIGHTS": "1",
    }


@contextmanager
def original_server(home: Path | None, pool_gb: float, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """The original's server, from its start until nobody needs it. ``home`` holds its package."""
    if home is None:
        raise RunFailed("not installed: --original names the directory that holds its package")
    program = home / "pegaflow" / "pegaflow-server-py"
    size = f"{max(1, round(pool_gb))}gb"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "--pool-size", size],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        start = time.monotonic()
        while SERVER_READY not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() - start > SERVER_SECONDS_MAX:
                raise RunFailed(f"its server does not start: {last_line(log)}")
            time.sleep(POLL_SECONDS)
        print(f"the original's server was ready after {time.monotonic() - start:.1f} s", file=sys.stderr)
        yield
    finally:
        end_session(process)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of whatever is left of a process and all that it started, and of what that leaves in shared memory."""
    scratch = scratch_of(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in scratch:
        path.unlink(missing_ok=True)


def scratch_of(session: int) -> list[Path]:
    """Buffers and semaphores of Python's that the processes of a session have mapped. Told apart by inode, since a
    semaphore is mapped under another name than it has later."""
    inodes = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # After the name in parentheses come state, parent, process group and session.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (folder / "maps").read_text().splitlines()
                inodes |= {int(line.split()[4]) for line in lines if f" {SHM_DIR}/" in line}
    names = [path for path in SHM_DIR.iterdir() if path.name.startswith(("psm_", "sem.mp-"))]
    return [path for path in names if path.lstat().st_ino in inodes]


def last_line(log: Path) -> str:
    """The last error that a log tells of, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["nothing was said"])[-1][-300:]


def home_of_ours() -> Path | None:
    """The directory that holds our package and its native module: installed, or a checkout in which it was built."""
    checkout = Path(__file__).parent.parent
    for path in (checkout, *map(Path, sys.path)):
        if list(path.glob("pegaflow/_native*.so")):
            return path.resolve()
    return None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--model", type=Path, help="directory with a config.json; weights are made up")
    parser.add_argument(
        "--connectors",
        nargs="+",
        choices=CONNECTORS,
        default=list(CONNECTORS[:-1]),
        help=f"pd knows {', '.join(PD_CONNECTORS)}, the others all but nixl",
    )
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=10_000)
    parser.add_argument("--output-tokens", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.0, help="prompts per second")
    parser.add_argument("--streams", type=int, default=8, help="requests that decode in itl")
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--unique-prompts", type=int, default=128)
    parser.add_argument("--unique-input-tokens", type=int, default=2048)
    parser.add_argument("--unique-output-tokens", type=int, default=32)
    parser.add_argument("--unique-rounds", type=int, default=3)
    parser.add_argument("--fill-prompts", type=int, default=8, help="that start and successor leave in the pool")
    parser.add_argument("--pool-gb", type=float, default=20.0)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share of the GPU's memory")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--settle-s", type=float, default=1.0, help="between rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=f"default: {', '.join(COMPILED)} only")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    parser.add_argument("--extra", type=json.loads, default={}, help="options of our connector, as JSON")
    parser.add_argument("--ours", type=Path, default=home_of_ours(), help="directory that holds our package")
    parser.add_argument("--original", type=Path, help="directory that holds the original's package")
    parser.add_argument("--seconds-max", type=float, default=240.0, help="of one engine")
    parser.add_argument("--minutes-max", type=float, default=60.0, help="after these no engine is started any more")
    parser.add_argument("--out", type=Path, default=Path("build/bench/vllm_gpu.json"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny sizes: does the benchmark work?")
    options = parser.parse_args(arguments)
    options.scenarios = options.scenarios or list(SCENARIOS)
    unknown = set(options.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}: there are {', '.join(SCENARIOS)}")
    if options.tiny:
        vars(options).update(TINY_SIZES, pool_gb=TINY_POOL_GB, batched_tokens=1024)
    return options


def main() -> None:
    """Run, print, write."""
    options = parse()
    if not options.tiny and options.model is None:
        print("vllm_gpu needs --model, a directory with the config.json of a model; --tiny brings its own.")
        return
    if not options.tiny and not list(Path("/dev").glob("nvidia[0-9]*")):
        print("vllm_gpu needs an NVIDIA GPU, and there is none; --tiny does without.")
        return
    if importlib.util.find_spec("vllm") is None:
        print("vllm_gpu needs vLLM, which is not installed.")
        return
    scratch = Path(tempfile.mkdtemp(prefix="vllm-gpu-"))
    if options.tiny and options.model is None:
        options.model = scratch
        (scratch / "config.json").write_text(json.dumps(TINY_MODEL))
    bench = Bench(options, scratch)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("vllm_gpu was told to end"))  # by way of all that follows
    try:
        bench.run()
    finally:
        print(f"\n{table(bench.runs)}\n\nwritten to {options.out}, logs in {scratch}", flush=True)


if __name__ == "__main__":
    main()
