"""Checks of shapes cost nothing in a compiled program: with and without them it is one graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from spec_lm import fused
from spec_lm.bench.cases import Case, Sizes, arguments
from spec_lm.bench.unchecked import unchecked
from spec_lm.bench.variants import variant
from spec_lm.reference import functional, modules

SMALL = Sizes(batch=2, sequence=6, d_model=8, heads=2, d_ff=12, vocab=10, layers=1)
Graph = list[tuple[str, ...]]


def graph_of(call: Callable[..., Any], given: tuple[Any, ...]) -> Graph:
    """What dynamo makes of a call, whole: each operation and its arguments, whatever the names and order of inputs."""
    found: list[Graph] = []

    def recording(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nodes = [node for node in module.graph.nodes if node.op != "placeholder"]
        used = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each.op == "placeholder")
        number = {node: f"node {i}" for i, node in enumerate((*used, *nodes))}
        found.append([_told(node, number) for node in nodes])
        return module.forward

    torch.compiler.reset()
    torch.compile(call, backend=recording, fullgraph=True, dynamic=False)(*given)
    (graph,) = found
    return graph


def _told(node: fx.Node, number: dict[fx.Node, str]) -> tuple[str, ...]:
    return node.op, str(node.target), *(str(fx.map_arg(each, number.__getitem__)) for each in (node.args, node.kwargs))


def test_the_compiled_model_with_checks_is_the_graph_of_the_one_without():
    given = arguments(Case("transformer_lm", SMALL), 0)
    (checked, inputs, _), (plain, _, _) = (
        variant(name).build("transformer_lm", given) for name in ("reference_checked", "reference")
    )
    assert isinstance(checked, modules.TransformerLM)
    assert not isinstance(plain, modules.TransformerLM)
    graph = graph_of(checked, inputs)
    assert graph == graph_of(plain, inputs)
    assert len(graph) > 50


@pytest.mark.parametrize("home", [functional, fused])
def test_a_compiled_operator_with_checks_is_the_graph_of_the_one_without(home):
    given = arguments(Case("multihead_self_attention_with_rope", SMALL), 0)
    checked, plain = (each.multihead_self_attention_with_rope for each in (home, unchecked()[home.__name__]))
    assert checked.__wrapped__
    assert graph_of(checked, given) == graph_of(plain, given)


def test_graphs_differ_where_one_does_more_or_another_thing():
    """As they would if the checks were traced."""

    def watched(x: Tensor, dim: int) -> Tensor:
        assert (x == x).all()
        return functional.softmax(x, dim)

    given = torch.ones(2, 3), -1
    graph = graph_of(functional.softmax, given)
    assert graph == graph_of(functional.softmax, given)
    assert graph != graph_of(lambda x, dim: functional.softmax(x, 0), given)
    with pytest.raises(Exception, match="data-dependent"):
        graph_of(watched, given)
