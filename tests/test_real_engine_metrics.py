"""/metrics/engines of a real gateway with two workers over fake engines, read by Prometheus's own parsers."""

from __future__ import annotations

import contextlib
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway_processes import ask, begin, gateway_argv, running, until
from prometheus_client.parser import text_string_to_metric_families

from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.running import in_thread

NAME = 'a "model" {of="many"}'


def page_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.nightly
@pytest.mark.processes
def test_prometheus_reads_the_engines_of_three_replicas_and_one_that_is_gone() -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(in_thread(Options(model=NAME))) for _ in range(3)]
        with in_thread(Options(model=NAME)) as gone:
            urls = [engine.url for engine in (*engines, gone)]
        upstreams = [word for url in urls for word in ("--upstream", f"m={url}")]
        process = stack.enter_context(running(gateway_argv("--workers", "2", *upstreams)))
        url = begin(process)["listen"]
        until(lambda: {ask(f"{url}/health")["ready_replicas"] for _ in range(10)} == {3})
        for engine in engines:
            ask(f"{engine.url}/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 4})
        with ThreadPoolExecutor(8) as pool:
            pages = list(pool.map(page_of, [f"{url}/metrics/engines"] * 8))
        tokens = {}
        for family in text_string_to_metric_families(pages[0]):
            if family.name == "vllm:generation_tokens":
                tokens = {sample.labels["replica"]: sample.value for sample in family.samples}
                assert {sample.labels["model_name"] for sample in family.samples} == {NAME}
        assert tokens == {f"upstream-{number}": 4.0 for number in (1, 2, 3)}
        for number in range(1, 5):
            assert f'penstock_engine_scrape_up{{replica="upstream-{number}"}} {int(number < 4)}\n' in pages[-1]
        for page in (pages[-1], page_of(f"{url}/metrics")):
            checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
            assert checked.returncode in (0, 3), checked.stderr  # 3: vLLM's names have colons
            assert "penstock" not in checked.stderr
