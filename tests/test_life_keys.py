"""Keys and usage of a deployment with real processes and the fake engine."""

from __future__ import annotations

import pytest
from launching import PROMPT, Place, ask, call, kill, now, pid_of, wait_until

from penstock import paths
from penstock.wire.answers import HttpError

pytestmark = pytest.mark.processes


def n_requests(key: str) -> int:
    lines = call("usage", "--by", "key", "--json").json
    return sum(line["requests"] for line in lines if line["key"] == key)


def is_answered(place: Place, key: str | None) -> bool:
    try:
        ask(place.run(), key=key)
    except HttpError as error:
        assert error.status == 401
        return False
    return True


def test_keys_are_made_for_a_running_deployment_and_outlive_it(place: Place) -> None:
    gateway = {"auth": "keys", "price": {"input": 1.0, "output": 1000.0}}
    file = place.write("one", gateway=gateway)
    first = call("up", file, "--json").events[-1]["key"]
    assert first.startswith("sk-")
    assert call("up", file, "--json").events[-1]["key"] is None, "it is shown once"
    kept = [path for path in paths.home().rglob("*") if path.is_file() and first.encode() in path.read_bytes()]
    assert kept == [], "its hash is kept, and no more"
    assert not is_answered(place, None) and not is_answered(place, "sk-wrong")
    assert [key["name"] for key in call("keys", "list", "--json").json] == ["first"]
    key = call("keys", "create", "--name", "alice", "--budget", "100").out.strip()
    wait_until(lambda: is_answered(place, key), "the gateway sees the new key")
    ask(place.run(), key=first)
    assert call("chat", "one", "--message", PROMPT).code == 0  # by the owner, without a key
    wait_until(lambda: n_requests("alice") == 1 and n_requests("first") == 1, "both requests are in the ledger")
    (line,) = (line for line in call("usage", "--by", "key,model", "--json").json if line["key"] == "alice")
    assert (line["model"], line["output_tokens"], line["estimates"]) == ("one", 8, 0)
    assert line["cost_usd"] == pytest.approx((line["prompt_tokens"] + 8000) / 1e6)

    kill(pid_of(place.run(), "gateway"))
    wait_until(lambda: now(place.run()).gateway.n_restarts == 1 and now(place.run()).phase == "ready", "it is back")
    assert is_answered(place, key)
    call("keys", "revoke", "alice", "--deployment", "one")
    wait_until(lambda: not is_answered(place, key), "the gateway sees that the key is revoked")

    second = call("keys", "create", "bob").out.strip()
    call("down", "one")
    again = call("up", file, "--json").events[-1]["key"]
    assert [is_answered(place, key) for key in (second, again, first)] == [True, True, False]
    assert n_requests("alice") >= 2
    call("keys", "revoke", "first")
    wait_until(lambda: not is_answered(place, again), "the key that `up` printed is revoked")
