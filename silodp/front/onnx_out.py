"""Models for others' machines: ONNX graphs from encoded features to probabilities or numbers (extra `onnx`).

A graph has no schema: rows are encoded before (`schema.features`). Their names, the classes and the promise are
in the file's metadata.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from silodp import __version__
from silodp.errors import ConfigError
from silodp.front.predictor import PARAMS, Linear, Network

OPSET, IR = 17, 8  # of 2022: most runtimes read them
ACTIVATIONS = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "softplus": "Softplus"}
Shapes = tuple[int, str, int]  # inputs, name and number of outputs
Layers = list[tuple[np.ndarray, np.ndarray]]  # weight (outputs, inputs) and bias


def write(estimator: Any, path: Path) -> Path:
    onnx = package()
    if path.exists():
        raise ConfigError(f"to_onnx: {path} exists; give another path")
    layers, activation = layers_of(estimator)
    classes = getattr(estimator, "classes_", None)
    nodes, arrays = Nodes(onnx), {}
    last = "features"
    for i, (weight, bias) in enumerate(layers):
        arrays |= {f"weight{i}": weight, f"bias{i}": bias}
        nodes.add("Gemm", [last, f"weight{i}", f"bias{i}"], f"dense{i}", transB=1)
        last = f"dense{i}"
        if i < len(layers) - 1:
            nodes.add(activation, [last], f"hidden{i}")
            last = f"hidden{i}"
    output = "prediction" if classes is None else "probabilities"
    arrays |= ending(nodes, estimator, last, output)
    outputs = 1 if classes is None else len(classes)
    shapes = (layers[0][0].shape[1], output, outputs)
    onnx.save(model_of(onnx, nodes, arrays, shapes, told(estimator)), str(path))
    return path


def package() -> Any:
    try:
        return importlib.import_module("onnx")
    except ImportError:
        raise ConfigError("to_onnx: needs onnx; pip install 'silodp[onnx]'") from None


class Nodes:
    """Steps of a graph."""

    def __init__(self, onnx: Any):
        self.make, self.steps = onnx.helper.make_node, []

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self.steps.append(self.make(kind, inputs, [output], **attributes))


def layers_of(estimator: Any) -> tuple[Layers, str]:
    """Dense layers, first to last, and what lies between them."""
    predictor = estimator._predictor
    if isinstance(predictor, Linear):
        return [(predictor.coef, predictor.intercept)], ""
    if not isinstance(predictor, Network) or predictor.section["kind"] != "mlp":
        raise ConfigError("to_onnx: only linear models and mlp have a form there; use save")
    arrays = {path.removeprefix(PARAMS): np.asarray(array) for path, array in predictor.arrays.items()}
    depth = len({path.split("/")[0] for path in arrays})
    return list(dense(arrays, depth)), ACTIVATIONS[predictor.section.get("activation") or "relu"]


def dense(arrays: dict[str, np.ndarray], depth: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for i in range(1, depth + 1):
        weight = arrays[f"dense{i}/weight"]
        yield weight, arrays.get(f"dense{i}/bias", np.zeros(len(weight)))


def ending(nodes: Nodes, estimator: Any, last: str, output: str) -> dict[str, np.ndarray]:
    """From scores to what is wanted, and the constants that this takes."""
    classes = getattr(estimator, "classes_", None)
    if classes is None:
        centre, half = estimator._centre_and_half()
        nodes.add("Mul", [last, "half"], "scaled")
        nodes.add("Add", ["scaled", "centre"], output)
        return {"half": np.array([half]), "centre": np.array([centre])}
    if estimator._predictor.scores(np.zeros((1, estimator._inputs), np.float32)).shape[1] > 1:
        nodes.add("Softmax", [last], output, axis=1)
        return {}
    nodes.add("Sigmoid", [last], "second")
    nodes.add("Sub", ["one", "second"], "first")
    nodes.add("Concat", ["first", "second"], output, axis=1)
    return {"one": np.array([1.0])}


def told(estimator: Any) -> dict[str, str]:
    certificate, classes = estimator.certificate_, getattr(estimator, "classes_", None)
    return {
        "silodp": __version__,
        "features": json.dumps(list(map(str, estimator.encoded_feature_names_))),
        "classes": "" if classes is None else json.dumps(classes.tolist()),
        "promise": "not private" if certificate is None else certificate["statement"],
        "stamp": "" if certificate is None else certificate["stamp"] or "",
        "plan": estimator.plan_fingerprint_,
    }


def model_of(onnx: Any, nodes: Nodes, arrays: dict[str, np.ndarray], shapes: Shapes, words: dict[str, str]) -> Any:
    (inputs, output, outputs), helper, number = shapes, onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes.steps, "silodp",
        [helper.make_tensor_value_info("features", number, ["records", inputs])],
        [helper.make_tensor_value_info(output, number, ["records", outputs])],
        [onnx.numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in arrays.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    helper.set_model_props(model, words)
    onnx.checker.check_model(model)
    return model
