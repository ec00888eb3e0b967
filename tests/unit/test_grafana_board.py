"""The Grafana board: its queries are PromQL over metrics and labels that exist, and no two panels lie on each other."""

import json
from typing import Any

import promql_parser
import pytest
from promql_parser import AggregateExpr, BinaryExpr, Call, VectorSelector

from pegaflow import exporter
from pegaflow.metrics import COUNTERS, GAUGES, HISTOGRAMS, prometheus_name
from tools._board import BOARD, COLUMNS, LABEL_NAME, Panel, Query, read_board

WHOLE = read_board()
QUERIES = [(panel.title, query) for panel in WHOLE.panels for query in panel.queries]
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


def nodes(expression: Any, *kinds: type) -> list[Any]:
    """Parts of a query of these kinds, as a parser of PromQL finds them."""
    found: list[Any] = []
    parsed = promql_parser.parse(expression) if isinstance(expression, str) else expression
    promql_parser.walk(parsed, pre_visit=found.append)
    return [node for node in found if isinstance(node, kinds)]


def names(expression: Any) -> list[str]:
    return [selector.name for selector in nodes(expression, VectorSelector)]


def grouped(expression: Any) -> list[str]:
    """Labels that aggregates name, whether they keep or drop them."""
    aggregates = nodes(expression, AggregateExpr)
    return [label for one in aggregates if one.modifier for label in one.modifier.labels]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_is_promql_of_metrics_that_exist_and_labels_that_they_have(title: str, query: Query) -> None:
    selectors = nodes(query.expression, VectorSelector)
    assert selectors, f"{title}: nothing is asked for"
    assert set(names(query.expression)) <= set(KNOWN), f"{title}: unknown"
    for one in selectors:
        chosen = "engine" if one.name.startswith("vllm:") else "pool"
        assert [matcher.name for matcher in one.matchers.matchers] == [chosen], "the board's variables apply to all"
        assert chosen in KNOWN[one.name]
    for aggregate in nodes(query.expression, AggregateExpr):
        for name in names(aggregate):
            assert set(grouped(aggregate)) <= set(KNOWN[name]), f"{title}: {name}"
    matchings = [one.modifier.matching for one in nodes(query.expression, BinaryExpr) if one.modifier]
    for matching in filter(None, matchings):
        assert set(matching.labels) <= set(grouped(query.expression)), title


def test_what_is_no_promql_does_not_pass() -> None:
    for wrong in ("sum(rate(a_total{b='c'}[8s])", "rate(a_total)", "sum by (a) (b) /", "a{b=~'$pool}", "nothing(a)"):
        with pytest.raises(ValueError):
            nodes(wrong)


def test_rates_are_those_of_what_only_grows_or_counts_since_the_pool_was_made() -> None:
    grow = {"vllm:pega_peer_read_bytes"}
    for title, query in QUERIES:
        for call in nodes(query.expression, Call):
            if call.func.name == "rate":
                [name] = names(call)
                assert name.endswith(("_total", "_bucket")) or name in grow, f"{title}: {name} is a gauge"
    for key in grow:
        assert key.removeprefix("vllm:pega_") in GAUGES


def metrics_of(title: str) -> list[set[str]]:
    """What each query of a panel names."""
    return [set(names(query.expression)) for of, query in QUERIES if of == title]


def test_each_token_of_a_prompt_is_in_one_query_and_all_are_in_the_whole() -> None:
    tokens = {f"{prometheus_name(key)}_total" for key in COUNTERS if key.endswith("_tokens") or "_tokens_" in key}
    assert len(tokens) == 5
    assert sorted(metrics_of("Tokens of prompts"), key=str) == sorted(({name} for name in tokens), key=str)
    parts = []
    for of, query in QUERIES:
        if of == "Where tokens of prompts came from":
            division = promql_parser.parse(query.expression)
            assert isinstance(division, BinaryExpr)
            parts += names(division.lhs)
            assert sorted(names(division.rhs)) == sorted(tokens)
    assert sorted(parts) == sorted(tokens - {f"{prometheus_name('miss_tokens')}_total"}), "the rest is computed"


def test_everything_that_goes_wrong_in_the_connector_is_in_the_panel_of_failures() -> None:
    bad = {f"{prometheus_name(key)}_total" for key in COUNTERS if key.endswith(("_failure", "_overdue", "_errors"))}
    assert set().union(*metrics_of("Failures")) == bad


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_legends_use_labels_that_the_query_leaves(title: str, query: Query) -> None:
    left = set(grouped(query.expression))
    if not nodes(query.expression, AggregateExpr):
        left = {label for name in names(query.expression) for label in KNOWN[name]}
    assert set(LABEL_NAME.findall(query.legend)) <= left, title


def test_variables_ask_for_metrics_that_exist() -> None:
    assert [variable.name for variable in WHOLE.variables] == ["engine", "pool"]
    for variable in WHOLE.variables:
        assert variable.label in KNOWN[variable.metric]


def cells(panel: Panel) -> set[tuple[int, int]]:
    place = panel.place
    return {(x, y) for x in range(place.x, place.x + place.w) for y in range(place.y, place.y + place.h)}


def test_panels_have_units_and_names_and_do_not_overlap() -> None:
    taken = {(x, place.y) for place in WHOLE.rows.values() for x in range(COLUMNS)}
    for panel in WHOLE.panels:
        assert max(x for x, _ in cells(panel)) < COLUMNS
        assert not taken & cells(panel), panel.title
        taken |= cells(panel)
        assert panel.unit
    assert len({panel.title for panel in WHOLE.panels}) == len(WHOLE.panels)


def test_no_two_panels_have_one_number() -> None:
    numbers = [panel["id"] for panel in json.loads(BOARD.read_text())["panels"]]
    assert len(set(numbers)) == len(numbers)
