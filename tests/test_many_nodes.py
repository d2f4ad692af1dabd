"""One replica cut by pipeline over two hosts, with real vLLM: by Ray and by vLLM's own processes.

The greedy text must be that of the uncut model, as it is by tensor (test_ssh_many_nodes, where hosts lose their power
too). No target is in the way: engines listen on the network between the hosts, with a key.
"""

from __future__ import annotations

import pytest
from hosts import Hosts
from nodes_rig import Rig, a_replica, plan_for

from penstock.testing.demo_prompts import DEMO_PROMPTS, MAX_TOKENS
from penstock.wire.client import Client, HttpError

pytestmark = [pytest.mark.hosts, pytest.mark.vllm]

CHATS = [row for row in DEMO_PROMPTS if row.kind == "chat"][:12]


def texts(rig: Rig) -> dict[str, str]:
    found = {}
    for row in CHATS:
        messages = [{"role": "user", "content": row.prompt}]
        model = rig.plan.served_names[0]
        found[row.prompt] = rig.client.chat(messages, model=model, max_tokens=MAX_TOKENS, temperature=0).text
    return found


def assert_nothing_left(hosts: Hosts) -> None:
    """On the hosts that are on: no process of the replica, no shared memory, no folder."""
    for host in hosts:
        if not host.is_on:
            continue
        ours = [process.argv for process in host.processes() if "PENSTOCK_RUN" in process.env]
        assert not ours, f"{host.name}: {ours}"
        listing = host.run(
            ["sh", "-c", "ls /dev/shm; ls -d /tmp/penstock-0badcafe* /tmp/ray* 2>/dev/null; true"]
        ).stdout
        assert listing.split() == [], f"{host.name}: {listing}"


@pytest.mark.parametrize(
    ("executor", "parallel"),
    [
        pytest.param("ray", {"pipeline": 2}, id="ray-pipeline"),
        pytest.param("mp", {"pipeline": 2}, id="mp-pipeline", marks=pytest.mark.nightly),
    ],
)
def test_the_text_is_that_of_the_uncut_model(hosts: Hosts, executor: str, parallel: dict[str, int]) -> None:
    with a_replica(hosts, plan_for("vllm", executor, parallel)) as rig:
        told = rig.wait_state("ready")
        assert [(node.host, node.address, node.state, node.ranks) for node in told.nodes] == [
            ("node1", hosts[0].address, "here", (0,)),
            ("node2", hosts[1].address, "here", (1,)),
        ]
        assert texts(rig) == {row.prompt: row.text for row in CHATS}
        assert told.url is not None and told.url.startswith(f"http://{hosts[0].address}:")
        assert_a_stranger_is_refused(told.url)
        assert rig.stop() == [0, 0]
        assert_nothing_left(hosts)


def assert_a_stranger_is_refused(url: str) -> None:
    for path in ("/v1/completions", "/invocations"):
        with pytest.raises(HttpError) as refused:
            Client(url).post_json(path, {"model": "x", "prompt": "1", "max_tokens": 1})
        assert refused.value.status == 401
