"""The public names: one list, each with a docstring whose examples run."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import pytest

import silodp
from silodp import registry

NAMES = [name for name in silodp.__all__ if name != "__version__"]
PROMISED = {
    "train", "sweep", "resume", "account", "audit", "load_data", "load_model", "register", "Algorithm", "Silo",
    "Federation", "Stream", "Release", "Public", "Channel", "Compressor", "Randomizer", "Config", "ConfigError",
    "FederatedData", "Model", "build_model", "from_loss", "Plan", "Facts", "Run", "Schema", "algorithms",
    "channels", "SiloClassifier", "SiloRegressor", "load", "__version__", "ImageFeatures", "from_torch", "to_torch",
}  # fmt: skip


def test_the_list_is_what_is_promised():
    assert set(silodp.__all__) == PROMISED
    assert set(dir(silodp)) >= PROMISED
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = silodp.trian  # type: ignore[attr-defined]


def documentation(name: str) -> str:
    return inspect.getdoc(getattr(silodp, name)) or ""


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_says_what_goes_in_and_what_comes_out(name):
    part, text = getattr(silodp, name), documentation(name)
    assert ">>> import" in text, f"{name} has no example"
    if inspect.isfunction(part) or name == "audit":
        assert "Args:\n" in text
        assert "Returns:\n" in text
    if inspect.isfunction(part):
        missing = [p for p in inspect.signature(part).parameters if p not in text and p != "objects"]
        assert not missing, f"{name} says nothing about {missing}"


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_run(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry.KINDS})  # examples register names
    examples = doctest.DocTestParser().get_doctest(documentation(name), {"__name__": "__main__"}, name, None, None)
    told: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=told.append)
    assert tried
    assert not failed, "".join(told)


def test_the_public_names_survive_the_folders_of_the_same_name():
    """Importing a folder binds it in the package: silodp.audit must stay callable, and no name may be hidden."""
    code = (
        "import silodp, silodp.run.runner, silodp.audit.table, silodp.plan.account\n"
        "from silodp import *\n"
        "kept = [n for n in silodp.__all__ if n not in ('algorithms', 'channels', '__version__')]\n"
        "assert all(callable(getattr(silodp, n)) for n in kept)\n"
        "assert callable(audit) and callable(account)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
