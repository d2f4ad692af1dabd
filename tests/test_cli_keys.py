"""`penstock keys` and `penstock usage`: what they print, and what a real client does with a made key."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import SSE_HEAD, chunk, rig_with, say
from golden_files import lines
from store_rig import Store, row
from test_cli import Shell

from penstock.cli import keys
from penstock.gateway.accounting.key_store import Limits


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PENSTOCK_STORE", str(tmp_path / "store.sqlite"))
    monkeypatch.setattr(keys, "SEEN_S", 0.0)
    return Shell(capsys)


def as_json(shell: Shell, *argv: str) -> Any:
    code, out, _ = shell(*argv, "--json")
    assert code == 0
    return json.loads(out)


def test_new_key_stands_alone_on_standard_output(shell: Shell) -> None:
    code, out, err = shell("keys", "create", "--name", "alice", "--rpm", "60", "--budget", "5", "--expires", "30d")
    secret = out.strip()
    assert (code, out) == (0, f"{secret}\n")
    assert secret.startswith("sk-") and secret not in err
    assert "alice" in err and "60 requests/min, $5/month, until" in err
    (key,) = as_json(shell, "keys", "list")
    assert (key["name"], key["rpm"], key["budget_usd"], key["state"]) == ("alice", 60, 5.0, "good")
    assert key["secrets"] == [f"sk-...{secret[-4:]}"]
    assert key["expires_at"] == pytest.approx(time.time() + 30 * 86400, abs=60)


def test_kept_secret_is_made_anew_only_when_it_is_old_or_gone(tmp_path: Path) -> None:
    file, store = tmp_path / "secrets" / "owner-key", Store(str(tmp_path / "store.sqlite"))
    file.parent.mkdir()
    (secret, is_new), again = (store.keys.keep("owner", file, 100.0, now) for now in (1000.0, 1099.0))
    assert is_new and again == (secret, False) and file.stat().st_mode & 0o777 == 0o600
    for n in range(1, 9):
        newer, is_new = store.keys.keep("owner", file, 100.0, 1000.0 + 100 * n)
        assert is_new and newer != secret
        secret = newer
        # The one before lives on for as long, and no others.
        ends = [each.expires_at for each in store.keys.find("owner").secrets]
        assert ends == [1100.0 + 100 * n, None]
    store.keys.revoke("owner", 1900.0)
    assert store.keys.keep("owner", file, 100.0, 1901.0)[1]
    store.close()


def test_a_key_has_a_bounded_number_of_secrets(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store.sqlite"))
    store.keys.create("script", Limits(), 0.0)
    made = [store.keys.rotate("script", 1000.0, float(second))[1] for second in range(1, 50)]
    kept = [each.ending for each in store.keys.find("script").secrets]
    assert kept == [secret[-4:] for secret in made[-16:]]
    store.close()


def test_key_is_rotated_and_revoked_by_name_or_id(shell: Shell) -> None:
    first = as_json(shell, "keys", "create", "alice", "--models", "m,n")
    assert first["models"] == ["m", "n"]
    code, out, _ = shell("keys", "rotate", "alice", "--grace", "1h")
    assert (code, out.strip() != first["key"]) == (0, True)
    assert len(as_json(shell, "keys", "list")[0]["secrets"]) == 2
    assert as_json(shell, "keys", "revoke", first["id"])["state"] == "revoked"
    code, _, err = shell("keys", "revoke", "alice")
    assert (code, "cannot find key" in err) == (2, True)
    assert "revoked" in shell("keys", "list")[1]


@pytest.mark.loopback
@pytest.mark.parametrize("words", [*lines("keys_mistakes.txt"), "keys create --name a\tb"])
def test_what_makes_no_sense_is_refused_in_words(shell: Shell, words: str) -> None:
    code, out, err = shell(*words.split(" "))
    assert (code, out) == (2, "") and "error: " in err


def test_usage_by_what_is_asked_and_at_what_price(shell: Shell, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store.sqlite"))
    now = time.time()
    key, _ = store.keys.create("alice", Limits(), now)
    rows = [row(n, at=now, key_id=key.id, prompt_tokens=1000, cached_tokens=400, output_tokens=500) for n in range(10)]
    nothing = {"prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "state": "refused", "status": 429}
    rows += [row(n, at=now, key_id=key.id, **nothing) for n in (11, 12)]
    store.usage.add_rows("w", [*rows, row(10, at=now - 9 * 86400, model="old", cost_usd=0.25)])
    store.close()
    assert list(as_json(shell, "usage", "--by", "key,model")[0].items()) == [
        *(("key", "alice"), ("model", "m"), ("requests", 10), ("prompt_tokens", 10000), ("cached_tokens", 4000)),
        *(("output_tokens", 5000), ("estimates", 0), ("refused", 2), ("cost_usd", None)),
    ]
    assert [line["model"] for line in as_json(shell, "usage", "--by", "model", "--since", "7d")] == ["m"]
    (total,) = as_json(shell, "usage", "--by", "", "--price", "m=10/20/1")
    assert (total["requests"], total["refused"]) == (11, 2)
    assert total["cost_usd"] == pytest.approx(0.06 + 0.1 + 0.004 + 0.25)
    (line,) = as_json(shell, "usage", "--by", "key", "--since", "1d", "--price", "m=10/20")
    assert line["cost_usd"] == pytest.approx(0.2)
    head, first, *_ = shell("usage", "--by", "model", "--csv")[1].splitlines()
    assert head == "model,requests,prompt_tokens,cached_tokens,output_tokens,estimates,refused,cost_usd"
    assert first == "m,10,10000,4000,5000,0,2,"
    text = shell("usage")[1]
    words = "KEY MODEL REQUESTS PROMPT TOKENS CACHED TOKENS OUTPUT TOKENS ESTIMATES REFUSED COST"
    assert text.splitlines()[0].split() == words.split()
    assert "alice" in text and " $0.25" in text


def test_usage_shows_what_the_gpus_cost_and_whose_tokens_they_made(shell: Shell, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store.sqlite"))
    now = time.time()
    alice, bob = (store.keys.create(name, Limits(), now)[0] for name in ("alice", "bob"))
    for number, (key, n_tokens) in enumerate(((alice, 2_000_000), (bob, 1_000_000))):
        store.usage.add_rows("w", [row(number, at=now, key_id=key.id, prompt_tokens=n_tokens, output_tokens=0)])
    store.usage.put_gpu_time({(int(now), "m"): (7200.0, 1800.0)}, 3.0)
    store.close()
    lines = as_json(shell, "usage", "--by", "key")
    assert [line["gpu_cost_usd"] for line in lines] == [4.0, 2.0]
    assert {(line["gpu_usd_per_million_tokens"], line["gpu_idle_share"]) for line in lines} == {(2.0, 0.75)}
    head, *_, last = shell("usage", "--by", "key")[1].splitlines()
    assert head.split()[-3:] == ["COST", "GPU", "COST"] and "$4.00" in shell("usage")[1]
    assert last == "GPUs: 2.0 hours ready, 75% of them idle; $6.00, $2.00 per million tokens"
    assert shell("usage", "--csv")[1].splitlines()[0].endswith("gpu_usd_per_million_tokens,gpu_idle_share")


def test_usage_is_pruned_and_stays_the_same(shell: Shell, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store.sqlite"))
    now = time.time()
    store.usage.add_rows("w", [row(number, at=now - number * 86400, cost_usd=0.5) for number in range(100)])
    by = ("usage", "--by", "day,key,model,state,replica")
    usage = as_json(shell, *by)
    assert as_json(shell, "usage", "prune", "--keep", "89d") == {"before": usage[10]["day"], "requests": 10}
    assert store.database.all("SELECT count(*) FROM requests") == [(90,)]
    assert as_json(shell, *by) == usage
    code, out, _ = shell("usage", "prune", "--before", usage[20]["day"])
    assert (code, out) == (0, f"10 requests from before {usage[20]['day']} (UTC) are kept as sums by day\n")
    # Today is not over; and no time is too long ago.
    assert as_json(shell, "usage", "prune", "--before", "2999-01-01")["requests"] == 79
    assert as_json(shell, "usage", "prune", "--keep", "999999999w") == {"before": "1970-01-01", "requests": 0}
    assert as_json(shell, *by) == usage
    assert as_json(shell, "usage", "--by", "", "--since", "999999999w")[0]["requests"] == 100
    store.close()


@pytest.mark.processes  # no process, but half a second of import
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop])
async def test_openai_client_with_a_made_key(loop_factory: object, shell: Shell, tmp_path: Path) -> None:
    """The client's own parser reads a stream out of which an event was taken."""
    openai = pytest.importorskip("openai")
    place = str(tmp_path / "store.sqlite")
    secret = shell("keys", "create", "--name", "alice", "--models", "demo")[1].strip()
    facts = b'"id":"1","object":"chat.completion.chunk","created":1,"model":"demo"'
    events = [
        b'data: {%s,"choices":[{"index":0,"delta":{"role":"assistant","content":"hel"}}]}\n\n' % facts,
        b'data: {%s,"choices":[{"index":0,"delta":{"content":"lo"},"finish_reason":"stop"}]}\n\n' % facts,
        b'data: {%s,"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6}}\n\n' % facts,
        b"data: [DONE]\n\n",
    ]
    reply = say(SSE_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")
    async with rig_with(reply, store=place, auth="keys") as (rig, _, _):
        url = f"http://127.0.0.1:{rig.gateway.public.port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key=secret, max_retries=0)
        asked: dict[str, Any] = {"model": "demo", "messages": [], "stream": True}
        chunks = [part async for part in await client.chat.completions.create(**asked)]
        assert "".join(part.choices[0].delta.content for part in chunks) == "hello"
        assert [part.usage for part in chunks] == [None, None]
        stream = await client.chat.completions.create(**asked, stream_options={"include_usage": True})
        assert [part.usage.completion_tokens async for part in stream if part.usage] == [2]
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-no").models.list()
        await client.close()
    (line,) = as_json(shell, "usage", "--by", "key")
    assert (line["key"], line["requests"], line["output_tokens"], line["estimates"]) == ("alice", 2, 4, 0)
    assert secret.encode() not in Path(place).read_bytes()
