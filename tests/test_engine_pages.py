"""Pages of several engines as one: hostile labels, clashes, old names, broken lines. Bytes in, bytes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.metrics.engine_pages import MAX_LINE_BYTES, EnginePages

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = 'a "quoted" {engine="0"} \\ back\nline'
RENAMED = {"vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc", "vllm:old_seconds": "vllm:new_seconds"}


def merged(*pages: str | bytes, **labels: str) -> str:
    """The pages of the replicas 0, 1, ... as one, which a real parser must accept."""
    engines = EnginePages(("vllm:", "llamacpp:"), RENAMED)
    for index, page in enumerate(pages):
        text = page.encode() if isinstance(page, str) else page
        engines.add(text, (("replica", str(index)), *labels.items()))
    out = b"".join(engines.write()).decode()
    families = [family.name for family in text_string_to_metric_families(out)]
    assert len(set(families)) == len(families)
    return out


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def gauge(*lines: str, name: str = "vllm:g") -> str:
    return "\n".join((f"# HELP {name} About.", f"# TYPE {name} gauge", *(f"{name}{line}" for line in lines), ""))


@pytest.mark.parametrize("page", ["vllm-0.32.0/metrics.txt", "llamacpp/metrics.txt"])
def test_recorded_pages_keep_every_sample_and_get_the_labels_first(page: str) -> None:
    text = (GOLDEN / page).read_text("utf-8")
    more = {"node": HOSTILE, "deployment": "demo"}
    expected = {
        (name, labels | {("replica", str(index)), *more.items()}): value
        for (name, labels), value in samples(text).items()
        if name.startswith(("vllm:", "llamacpp:")) and not name.endswith("_created")
        for index in range(3)
    }
    out = merged(text, text, text, **more)
    assert samples(out) == expected
    lines = [line for line in out.splitlines() if line[0] != "#"]
    assert all(line.partition("{")[2].startswith('replica="') for line in lines)
    assert out.count("# TYPE vllm:num_requests_running ") == text.count("# TYPE vllm:num_requests_running ")


def test_hostile_values_of_labels_stay_as_they_are() -> None:
    values = ('{engine=\\"0\\",', "a}b{c", "\\\\", '\\"', "\\n# TYPE vllm:g counter\\n", "x} 1", "é", "")
    page = gauge(*(f'{{engine="0",model_name="{value}"}} {index}' for index, value in enumerate(values)))
    out = merged(page, page)
    assert len(samples(out)) == 2 * len(values)
    for index, value in enumerate(values):
        assert f'vllm:g{{replica="1",engine="0",model_name="{value}"}} {index}\n' in out
    assert 'a="\ufffd"' in merged(b'# TYPE vllm:g gauge\nvllm:g{a="\xff"} 1\n'), "bytes that are no text"


def test_a_label_of_ours_that_an_engine_sets_is_exported() -> None:
    out = merged(gauge('{engine="0",replica="x"} 1'), gauge('{replica="y",exported_replica="z",node="n"} 2'), node="m")
    assert 'vllm:g{replica="0",node="m",engine="0",exported_replica="x"} 1\n' in out
    both = 'vllm:g{replica="1",node="m",exported_replica="z",exported_exported_replica="y",exported_node="n"} 2\n'
    assert both in out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (" 1", '{replica="0"} 1'),
        ("{} 1", '{replica="0"} 1'),
        ('{a="1",} 1', '{replica="0",a="1"} 1'),
        ('{ a = "1" , b="2" } 1 1700000000000', '{replica="0",a="1",b="2"} 1 1700000000000'),
        ('{a="1"} NaN', '{replica="0",a="1"} NaN'),
        ('{a="1"} +Inf\r', '{replica="0",a="1"} +Inf'),
        ('{a="1",a="2"} 1', None),
        ('{a="1" b="2"} 1', None),
        ('{a="1} 1', None),
        (" one", None),
        (" 1_0", None),
        (" 1 2 3", None),
        ("_other 1", None),
        (f" {'1' * MAX_LINE_BYTES}", None),
    ],
)
def test_odd_lines_are_understood_or_left_out(line: str, expected: str | None) -> None:
    page = gauge(' 2\nvllm:g{engine="0"} 3').replace("vllm:g 2", f"vllm:g{line}")
    out = merged(page)
    lines = out.splitlines()[2:]
    assert (lines[0] == f"vllm:g{expected}") if expected else len(lines) == 1
    assert lines[-1] == 'vllm:g{replica="0",engine="0"} 3'


@pytest.mark.parametrize("end", ['"} x7', '"} 1e', '"} 1 2 3', '" 1', '"} ', "", '"} 1"} y'])
def test_a_broken_line_costs_no_other_line(end: str) -> None:
    page = gauge('{engine="0"} 1', f'{{engine="1{end}', '{engine="2"} 3')
    lines = [line for line in merged(page, gauge('{engine="0"} 5')).splitlines() if line[0] != "#"]
    kept = (("0", "0", 1), ("0", "2", 3), ("1", "0", 5))
    assert lines == [f'vllm:g{{replica="{row}",engine="{engine}"}} {value}' for row, engine, value in kept]


def test_old_names_become_present_ones_and_a_page_with_both_shows_the_present_one() -> None:
    old = gauge('{engine="0"} 0.5', name="vllm:gpu_cache_usage_perc")
    new = gauge('{engine="0"} 0.25', name="vllm:kv_cache_usage_perc")
    out = merged(old, new, old + new, new + old)
    assert [line for line in out.splitlines() if line[0] != "#"] == [
        'vllm:kv_cache_usage_perc{replica="0",engine="0"} 0.5',
        *(f'vllm:kv_cache_usage_perc{{replica="{index}",engine="0"}} 0.25' for index in (1, 2, 3)),
    ]
    histogram = '# TYPE vllm:old_seconds histogram\nvllm:old_seconds_bucket{le="+Inf"} 2\nvllm:old_seconds_count 2\n'
    out = merged(histogram + "vllm:old_seconds_sum 3\n")
    assert "# TYPE vllm:new_seconds histogram\n" in out and "old" not in out
    assert 'vllm:new_seconds_bucket{replica="0",le="+Inf"} 2\nvllm:new_seconds_count{replica="0"} 2\n' in out


def test_what_is_no_family_of_an_engine_is_left_out() -> None:
    page = gauge('{engine="0"} 1')
    others = gauge(" 1", name="process_cpu") + gauge('{engine="0"} 1', name="vllm:g_created")
    assert merged(others + page + others) == merged(page)
    assert merged('# TYPE vllm:g"h gauge\nvllm:g"h 1\n') == ""
    assert merged(b"", b"\xff\xfe", b"<html>\n", others, "# TYPE", "# TYPE \n", "# TYPE vllm:x counter") == (
        "# TYPE vllm:x counter\n"
    )


def test_comments_may_stand_anywhere_and_a_family_that_comes_twice_or_with_another_kind_counts_once() -> None:
    page = '# TYPE vllm:g gauge\n# HELP vllm:g About.\nvllm:g{a="1"} 1\n\n# a comment\nvllm:g{a="2"} 2\n# EOF\n'
    assert samples(merged(page)) == samples(merged(gauge('{a="1"} 1', '{a="2"} 2')))
    page, counter = gauge('{a="1"} 1'), gauge('{a="1"} 7').replace("gauge", "counter")
    assert merged(page + page) == merged(page)
    assert merged(page, counter) == merged(page)
    assert merged(page, counter, page).count("vllm:g{") == 2
