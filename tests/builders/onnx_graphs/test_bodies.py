from onnx import TensorProto, helper

from builders.onnx_graphs.bodies import list_bodies, list_captured, list_reads, walk_graphs, walk_nodes


def branch(name, *nodes):
    return helper.make_graph(list(nodes), name, [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])])


def test_bodies_are_found_in_both_kinds_of_attributes_at_any_depth():
    leaf = branch("leaf", helper.make_node("Identity", ["x"], ["y"], name="inmost"))
    inner = branch("inner", helper.make_node("If", ["c"], ["y"], name="second", then_branch=leaf, else_branch=leaf))
    several_node = helper.make_node("Custom", ["c"], ["z"], name="first", bodies=[inner, leaf])
    graph = branch("outer", several_node, helper.make_node("Relu", ["z"], ["y"], name="last"))
    assert [body.name for body in list_bodies(several_node)] == ["inner", "leaf"]
    assert [part.name for part in walk_graphs(graph)] == ["outer", "inner", "leaf", "leaf", "leaf"]
    assert [node.name for node in walk_nodes(graph)] == ["first", "last", "second", "inmost", "inmost", "inmost"]
    assert list_bodies(graph.node[1]) == []


def test_a_node_reads_its_inputs_and_those_captured_by_its_bodies():
    body = branch("body", helper.make_node("Add", ["x", "w"], ["s"]), helper.make_node("Mul", ["s", "x"], ["y"]))
    body.initializer.add(name="w")
    outer_branch = branch("outer", helper.make_node("If", ["d"], ["y"], then_branch=body, else_branch=body))
    node = helper.make_node("If", ["c", ""], ["z"], then_branch=outer_branch, else_branch=body)
    assert list_reads(node) == ["c", "x", "d"] and list_captured(node) == ["x", "d"]
