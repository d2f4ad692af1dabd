"""Real vLLM in a job of two nodes: the greedy text is that of the uncut model.

Nightly: real vLLM over two nodes is tested over ssh and by Ray, a job of two nodes with the fake engine.
"""

from __future__ import annotations

import json

import pytest
from slurm_cluster import Desk

from penstock.testing.demo_prompts import DEMO_PROMPTS, MAX_TOKENS

pytestmark = [pytest.mark.hosts, pytest.mark.vllm, pytest.mark.nightly]

CHATS = [row for row in DEMO_PROMPTS if row.kind == "chat"][:6]

ASK = """
import json, sys
from penstock.wire.client import Client
client, found = Client(sys.argv[1], timeout_s=60.0), []
for prompt in json.loads(sys.argv[2]):
    messages = [{"role": "user", "content": prompt}]
    found.append(client.chat(messages, model="one", max_tokens=int(sys.argv[3]), temperature=0).text)
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("executor", "parallel"),
    [pytest.param("mp", {"tensor": 2}, id="mp-tensor"), pytest.param("ray", {"pipeline": 2}, id="ray-pipeline")],
)
def test_the_text_of_a_job_of_two_nodes_is_that_of_the_uncut_model(
    desk: Desk, executor: str, parallel: dict[str, int]
) -> None:
    engine = {"kind": "vllm", "executor": executor, "max_model_len": 1024}
    file = desk.write(engine=engine, hardware={"nodes": 2, "gpus_per_node": 0}, parallel=parallel)
    try:
        desk.up(file)
        prompts = json.dumps([row.prompt for row in CHATS])
        told = json.loads(desk.python(ASK, desk.status()["url"], prompts, str(MAX_TOKENS)))
        assert told == [row.text for row in CHATS]
        assert [node["host"] for node in desk.replica()["announcement"]["nodes"]] == ["node1", "node2"]
        desk.down()
    finally:
        desk.ask("down", "one", "--now")
