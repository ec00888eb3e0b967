"""What do several instances of real vLLM gain from one pool, and what is left when one of them dies?"""

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._gpu_instances import GB, Kind
from benchmarks._gpu_scenarios import SCENARIOS, Scenarios
from benchmarks._model_shapes import SHAPES
from benchmarks.vllm_gpu import home_of_ours

KINDS = {
    "ours": Kind("ours"),
    "ours-apart": Kind("ours", shared=False),
    "offloading": Kind("offloading", shared=False),
    "original": Kind("original"),
    "none": Kind("none"),
}
TINY = {
    "shape": "tiny",
    "pool_gb": 0.02,
    "prefixes": 6,
    "prefix_tokens": 256,
    "tail_tokens": 32,
    "warm_requests": 12,
    "requests": 24,
    "output_tokens": 2,
    "at_once": 2,
    "stream_tokens": 64,
    "fill_prompts": 6,
    "gpu_tokens": 2080,
    "block_tokens": 32,
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["ours", "ours-apart", "offloading", "original"])
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="default: all there are")
    parser.add_argument("--instances", type=int, help="they take turns on the GPUs; default: one per GPU, two at least")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="of the model; weights are made up")
    parser.add_argument("--pool-gb", type=float, default=40.0, help="of all instances together")
    parser.add_argument("--prefixes", type=int, default=120, help="different ones, popular by Zipf's law")
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--tail-tokens", type=int, default=128)
    parser.add_argument("--skew", type=float, default=0.6, help="exponent of Zipf's law")
    parser.add_argument("--warm-requests", type=int, default=240, help="before anything is measured")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=4, help="requests of an instance")
    parser.add_argument("--stream-tokens", type=int, default=600)
    parser.add_argument("--fill-prompts", type=int, default=40, help="of twice a prefix: what start and loads find")
    parser.add_argument("--gpu-tokens", type=int, default=40_960, help="that fit into the KV cache of an instance")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--tensor-parallel", type=int, help="GPUs of the engine in tp; default: all")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of the engines, as JSON")
    parser.add_argument("--extra", type=json.loads, default={}, help="options of our connector, as JSON")
    parser.add_argument("--compile", action="store_true", help="with CUDA graphs; starts take longer")
    parser.add_argument("--ours", type=Path, default=home_of_ours(), help="directory that holds our package")
    parser.add_argument("--original", type=Path, help="directory that holds the original's package")
    parser.add_argument("--seconds-max", type=float, default=240.0, help="for a start, or one answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bench/multi_gpu.json"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model and sizes, without GPUs too: does it work?")
    options = parser.parse_args(arguments)
    options.scenarios = options.scenarios or list(SCENARIOS)
    unknown = set(options.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}: there are {', '.join(SCENARIOS)}")
    if options.tiny:
        vars(options).update(TINY)
    options.instances = options.instances or max(2, options.gpus)
    options.tensor_parallel = options.tensor_parallel or max(1, options.gpus)
    options.pool_bytes = int(options.pool_gb * GB)
    options.kinds = [KINDS[name] for name in options.kinds]
    return options


def count_gpus() -> int:
    """NVIDIA GPUs that this machine has."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def table(rows: Sequence[dict[str, object]]) -> str:
    """Markdown."""
    lines = ["| scenario | cache | what | value |", "| --- | --- | --- | ---: |"]
    for row in rows:
        cells = (str(row[name]).replace("|", "/") for name in ("scenario", "cache", "what", "value"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run, print, write."""
    options = parse()
    if not options.tiny and not options.gpus:
        print("multi_gpu needs NVIDIA GPUs, and there is none; --tiny does without.")
        return
    if importlib.util.find_spec("vllm") is None:
        print("multi_gpu needs vLLM, which is not installed.")
        return
    scratch = Path(tempfile.mkdtemp(prefix="multi-gpu-"))
    (scratch / "config.json").write_text(json.dumps(SHAPES[options.shape]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("multi_gpu was told to end"))  # by way of all that follows
    scenarios = Scenarios(options, scratch)
    try:
        for name in options.scenarios:
            scenarios.run(name)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(scenarios.rows, indent=1) + "\n")
    finally:
        print(f"\n{table(scenarios.rows)}\n\nwritten to {options.out}, logs in {scratch}", flush=True)


if __name__ == "__main__":
    main()
