"""Records as trees: an array, or dicts and tuples of arrays, each with the records along its first axis. No JAX here.

A record's description is the same tree with a text for every array, its type and the shape of one record's part, e.g.

    ({"tokens": "int32[12]", "age": "float32[]"}, ("int32[]", "float32[]"))

It is public, and JSON can hold it. An array is named by its path: features/tokens, features/age, targets/0, targets/1.

A record with a weight of its own has {"target": ..., "sample weight": ...} where others have the target; one whose silo
has an intercept has "silo offset" beside its target, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Arrays = Any  # an array, or dicts and tuples of Arrays
Description = Any  # the same with texts

STORED = {"f": "float32", "i": "int32", "u": "int32", "b": "bool"}  # by numpy's kind of type
INT32 = np.iinfo(np.int32)
PARTS = ("features", "targets")  # of a record
TARGET, WEIGHT, OFFSET = "target", "sample weight", "silo offset"


def number_only(self: Any) -> str:
    """The repr of a tuple of arrays with the records first: how many they are, and none of them."""
    return f"{type(self).__name__}({len(self[0])} records)"


def with_weight(targets: Any, weights: Any) -> dict[str, Any]:
    """Targets of records that have weights of their own."""
    return {TARGET: targets, WEIGHT: weights}


def with_offset(targets: Any, offsets: Any) -> dict[str, Any]:
    """Targets of records whose scores are moved by so much; they keep their weights."""
    return (targets if has_more(targets) else {TARGET: targets}) | {OFFSET: offsets}


def has_more(targets: Any) -> bool:
    """Whether there is something of the library's own beside the target; a user's own dict is something else."""
    return isinstance(targets, dict) and {TARGET} < set(targets) <= {TARGET, WEIGHT, OFFSET}


def has_weight(targets: Any) -> bool:
    """Of a record's targets, or of their description."""
    return has_more(targets) and WEIGHT in targets


def target_of(targets: Any) -> Any:
    return targets[TARGET] if has_more(targets) else targets


def moved(scores: Any, targets: Any) -> Any:
    """Scores with what the records' silo adds to them; one score stands for two classes."""
    if not has_more(targets) or OFFSET not in targets:
        return scores
    offset = targets[OFFSET]
    return scores + (offset if scores.ndim == offset.ndim else offset[..., 1] - offset[..., 0])


def without_weight(targets: Any) -> Any:
    """What a loss looks at."""
    return with_offset(targets[TARGET], targets[OFFSET]) if OFFSET in targets else target_of(targets)


class Kind(NamedTuple):
    """Type and shape of what one record has in an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @staticmethod
    def of(array: np.ndarray) -> Kind:
        return Kind(str(array.dtype), array.shape[1:])

    @staticmethod
    def read(text: str) -> Kind:
        found = re.fullmatch(r"(float32|int32|bool)\[((?:\d+(?:,\d+)*)?)\]", text)
        if found is None:
            raise ValueError(f"record: {text!r} describes no array; need e.g. float32[5]")
        return Kind(found[1], tuple(map(int, filter(None, found[2].split(",")))))


def tree_map(function: Callable[[str, Any], Any], tree: Any, name: str) -> Any:
    """The tree with function(path, leaf) for every leaf; paths start with `name`."""
    if type(tree) is dict:
        return {key: tree_map(function, tree[key], f"{name}/{key}") for key in tree}
    if type(tree) is tuple:
        return tuple(tree_map(function, part, f"{name}/{i}") for i, part in enumerate(tree))
    return function(name, tree)


def named(tree: Any, name: str) -> dict[str, Any]:
    """Leaves by their path."""
    leaves: dict[str, Any] = {}
    tree_map(leaves.__setitem__, tree, name)
    return leaves


def named_parts(record: tuple[Any, Any]) -> dict[str, Any]:
    """Leaves of (features, targets) by their path."""
    return named(record[0], PARTS[0]) | named(record[1], PARTS[1])


def map_parts(function: Callable[[str, Any], Any], record: tuple[Any, Any]) -> tuple[Any, Any]:
    """Function(path, leaf) for every leaf of (features, targets)."""
    return tree_map(function, record[0], PARTS[0]), tree_map(function, record[1], PARTS[1])


def described(record: tuple[Arrays, Arrays]) -> tuple[Description, Description]:
    return map_parts(lambda _, array: str(Kind.of(array)), record)


def kinds(record: tuple[Description, Description]) -> dict[str, Kind]:
    return {name: Kind.read(text) for name, text in named_parts(record).items()}


def checked(record: Any) -> tuple[Description, Description]:
    """A description as it is or as JSON brings it; an error when it describes nothing."""
    record = _with_tuples(record)
    if type(record) is not tuple or len(record) != 2:
        raise ValueError("record: need a pair, the features and the targets")
    if not kinds(record):
        raise ValueError("record: describes no array")
    return record


def _with_tuples(tree: Any) -> Any:
    """JSON knows no tuples: its lists are ours."""
    if isinstance(tree, dict):
        return {key: _with_tuples(part) for key, part in tree.items()}
    return tuple(map(_with_tuples, tree)) if isinstance(tree, list | tuple) else tree


def as_arrays(tree: Any, name: str) -> Arrays:
    """Every leaf as float32, int32 or bool; the tree stays as it is. Errors name the array, never a value."""
    _check_containers(tree, name)
    arrays = tree_map(_as_array, tree, name)
    if not named(arrays, name):
        raise ValueError(f"{name}: no arrays; give at least one")
    return arrays


def _check_containers(tree: Any, name: str) -> None:
    if isinstance(tree, Mapping | tuple) and type(tree) not in (dict, tuple):
        raise ValueError(f"{name}: a {type(tree).__name__} cannot be kept; use a dict or a tuple")
    if type(tree) is tuple:
        tree = {str(i): part for i, part in enumerate(tree)}
    for key, part in tree.items() if type(tree) is dict else ():
        if not isinstance(key, str) or not key or "/" in key:
            raise ValueError(f"{name}: the key {key!r} cannot name an array; use text without '/'")
        _check_containers(part, f"{name}/{key}")


def _as_array(name: str, given: Any) -> np.ndarray:
    try:
        array = np.asarray(given)
    except ValueError:
        raise ValueError(f"{name}: rows of different lengths; need one array, records first") from None
    if array.dtype.kind not in STORED:
        raise ValueError(f"{name}: type {array.dtype}; need numbers or truth values")
    if array.ndim == 0:
        raise ValueError(f"{name}: a single number; need an array, records first")
    if array.dtype.kind in "iu" and array.size and not INT32.min <= array.min() <= array.max() <= INT32.max:
        raise ValueError(f"{name}: whole numbers beyond int32; give smaller ones or float32")
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, as in a table
        return array.astype(STORED[array.dtype.kind], copy=False)


def count(arrays: Mapping[str, np.ndarray]) -> int:
    """How many records the arrays have; all must have the same."""
    (first, length), *others = [(name, len(array)) for name, array in arrays.items()]
    for name, other in others:
        if other != length:
            raise ValueError(f"{name}: {other} records, but {first} has {length}; every array needs the same number")
    return length


def difference(found: Mapping[str, str], wanted: Mapping[str, str], whose: str) -> str | None:
    """The first thing in which descriptions by name differ, in words; None if they are alike."""
    for name in found:
        if name not in wanted:
            return f"{name}: {whose} has no such array"
    for name, kind in wanted.items():
        if name not in found:
            return f"{name} is missing; {whose} has it"
        if found[name] != kind:
            return f"{name}: {found[name]}, but {whose} has {kind}"
    return None


def fitting(description: tuple[Description, Description], arrays: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
    """The tree of arrays that came by name; an error when they are not what the description says."""
    scalars = [name for name, array in arrays.items() if array.ndim == 0]
    if scalars:
        raise ValueError(f"{scalars[0]}: a single number; need an array, records first")
    found = {name: str(Kind.of(array)) for name, array in arrays.items()}
    told = difference(found, named_parts(description), "the plan")
    if told is not None:
        raise ValueError(told)
    count(arrays)
    return map_parts(lambda name, _: arrays[name], description)
