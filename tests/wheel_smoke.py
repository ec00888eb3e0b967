"""Does an installed wheel work? Run by ``make wheel-test`` with a bare interpreter of each version, where nothing is
installed but the wheel and what it asks for: ``python wheel_smoke.py DIRECTORY`` with an empty directory in a tmpfs.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

POOL_BYTES = 64 << 20
VALUES = {"empty": b"", "small": b"42", "large": bytes(range(256)) * 4096}
LOOK = """
import json, sys
from pegaflow import PegaEngine
with PegaEngine(name="smoke", shm_dir=sys.argv[1]) as engine:
    print(json.dumps({key: len(engine.get(key)) for key in sys.argv[2:]}))
"""


def output_of(*command: str) -> str:
    """What a program prints; it has to succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout


def main() -> None:
    """Fails at the first thing that is not as it should be."""
    place = sys.argv[1]
    import pegaflow
    from pegaflow import PegaEngine

    installed = Path(sysconfig.get_path("purelib"))
    assert installed in Path(str(pegaflow.__file__)).parents, f"{pegaflow.__file__} is not in {installed}"

    with PegaEngine(name="smoke", shm_dir=place, pool_size=POOL_BYTES) as engine:
        for key, value in VALUES.items():
            engine.put(key, value)
        assert {key: engine.get(key) for key in VALUES} == VALUES
        assert engine.get("absent") is None
        assert engine.remove("empty") == b""
        assert engine.get("empty") is None
    seen = json.loads(output_of(sys.executable, "-c", LOOK, place, "small", "large"))
    assert seen == {"small": 2, "large": 1 << 20}, f"another process found {seen}"

    command = str(Path(sys.executable).with_name("pegaflow"))
    assert "doctor" in output_of(command, "--help")
    assert pegaflow.__version__ in output_of(command, "--version")
    pools = json.loads(output_of(command, "pools", "--json", "--shm-dir", place))
    assert "smoke" in json.dumps(pools), f"the pool is not listed: {pools}"
    output_of(command, "verify", "smoke", "--shm-dir", place)


if __name__ == "__main__":
    main()
