"""The Grafana board: each query names metrics and labels that exist, and no two panels lie on each other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pegaflow import exporter
from pegaflow.metrics import COUNTERS, GAUGES, HISTOGRAMS, prometheus_name

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "pegaflow.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
SELECTED = re.compile(r"((?:vllm:pega_|pegaflow_)\w+)\{([^}]*)\}")
NAMED = re.compile(r"(?:vllm:pega_|pegaflow_)\w+")
VLLM_LABELS = ("engine", "model_name")
"""Labels that vLLM gives to all metrics of a connector."""


def known_metrics() -> dict[str, tuple[str, ...]]:
    """Labels by the name of each series."""
    known: dict[str, tuple[str, ...]] = {}
    for key in COUNTERS:
        known[f"{prometheus_name(key)}_total"] = VLLM_LABELS
    for key in GAUGES:
        known[prometheus_name(key)] = VLLM_LABELS
    for key in HISTOGRAMS:
        for suffix, more in (("bucket", ("le",)), ("sum", ()), ("count", ())):
            known[f"{prometheus_name(key)}_{suffix}"] = (*VLLM_LABELS, *more)
    for name, (_, labels) in exporter._GAUGES.items():
        known[f"pegaflow_{name}"] = labels
    for name, (_, labels) in exporter._COUNTERS.items():
        known[f"pegaflow_{name}_total"] = labels
    return known


KNOWN = known_metrics()


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_names_metrics_that_exist_and_labels_that_they_have(title: str, query: str) -> None:
    names = NAMED.findall(query)
    assert names, f"{title}: nothing is asked for"
    assert set(names) <= set(KNOWN), f"{title}: unknown"
    assert len(SELECTED.findall(query)) == len(names), f"{title}: the board's variables do not apply to all of it"
    labels = {label for name in names for label in KNOWN[name]}
    for _, selection in SELECTED.findall(query):
        assert set(re.findall(r"(\w+)=~", selection)) <= labels
    for group in re.findall(r"by \(([^)]*)\)", query):
        assert set(re.split(r",\s*", group)) <= labels, f"{title}: {group}"
    assert query.count("(") == query.count(")")


def test_rates_are_those_of_what_only_grows_or_counts_since_the_pool_was_made() -> None:
    grow = {"vllm:pega_peer_read_bytes"}
    for title, query in QUERIES:
        for name in re.findall(r"rate\(([\w:]+)", query):
            assert name.endswith(("_total", "_bucket")) or name in grow, f"{title}: {name} is a gauge"
    for key in grow:
        assert key.removeprefix("vllm:pega_") in GAUGES


def metrics_of(title: str) -> list[set[str]]:
    """What each query of a panel names."""
    return [set(NAMED.findall(query)) for of, query in QUERIES if of == title]


def test_each_token_of_a_prompt_is_in_one_query_and_all_are_in_the_whole() -> None:
    tokens = {f"{prometheus_name(key)}_total" for key in COUNTERS if key.endswith("_tokens") or "_tokens_" in key}
    assert len(tokens) == 5
    assert sorted(metrics_of("Tokens of prompts"), key=str) == sorted(({name} for name in tokens), key=str)
    shares = [query for of, query in QUERIES if of == "Where tokens of prompts came from"]
    parts = {name for query in shares for name in NAMED.findall(query.split(" / ")[0])}
    assert parts == tokens - {f"{prometheus_name('miss_tokens')}_total"}, "the rest is computed"
    for query in shares:
        part, whole = query.split(" / ")
        assert len(NAMED.findall(part)) == 1
        assert sorted(NAMED.findall(whole)) == sorted(tokens)


def test_everything_that_goes_wrong_in_the_connector_is_in_the_panel_of_failures() -> None:
    bad = {f"{prometheus_name(key)}_total" for key in COUNTERS if key.endswith(("_failure", "_overdue", "_errors"))}
    assert set().union(*metrics_of("Failures")) == bad


def test_legends_use_labels_that_the_query_leaves() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            left = {label for group in grouped for label in re.split(r",\s*", group)}
            if not grouped and "sum(" not in target["expr"]:
                left = {label for name in NAMED.findall(target["expr"]) for label in KNOWN[name]}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, target["legendFormat"]


def test_variables_ask_for_metrics_that_exist() -> None:
    for variable in BOARD["templating"]["list"][1:]:
        [(name, label)] = re.findall(r"label_values\(([\w:]+), (\w+)\)", variable["query"]["query"])
        assert label in KNOWN[name]


def test_panels_have_units_and_names_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
