"""Objects and configs are two ways to say the same run."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp import registry
from silodp.algorithms import find
from silodp.channels import Compressed, Duchi, PrivUnitG, Shuffled, Summed, Trusted, Untrusted
from silodp.channels.compressed import Shift
from silodp.compressors import QSGD, Identity, Natural, RandK
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.parse import parse_config, to_toml
from silodp.plan.objects import config_from, nested
from silodp.plan.parts import channel_of
from tests.conftest import made_data


class Careful(Untrusted):
    """A trust model from outside with an option of its own."""

    margin: float = eqx.field(static=True, kw_only=True, default=2.0)


class Biggest(silodp.Compressor):
    """A biased compressor from outside."""

    unbiased = False
    keep: int = eqx.field(static=True)

    def bits(self, d: int) -> int:
        return 32 * d

    def __call__(self, v, randomness):
        return v

    def encode(self, v, randomness) -> bytes:
        return np.asarray(v).tobytes()

    def decode(self, data: bytes, d: int):
        return np.frombuffer(data, np.float32)


class Listening(Shuffled):
    """A shuffler from outside."""


class Packing(Compressed):
    """Compression from outside."""


CHANNELS = [
    Trusted(),
    Untrusted(),
    Careful(margin=3.5),
    Compressed(compressor=RandK(3)),
    Compressed(compressor=RandK(3), mask_amplification=True),
    Compressed(compressor=QSGD(4), shifted=True, shift=Shift(0.2)),
    Compressed(compressor=Natural(), shifted=True),
    Compressed(compressor=Identity()),
    Compressed(compressor=Biggest(keep=2)),
    Packing(compressor=RandK(3)),
    Listening(randomizer=PrivUnitG),
    Shuffled(),
    Shuffled(randomizer=Duchi),
    Shuffled(randomizer=PrivUnitG),
    Summed(),
    Summed(grid=64),
]


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: str(channel)[:60])
def test_a_channel_survives_its_options(channel):
    options = {"algorithm.name": "spider"} | channel.options()
    again = channel_of(parse_config(nested(options)), find("spider"))
    assert type(again) is type(channel)
    assert eqx.tree_equal(again, channel)


def test_the_options_of_a_channel_name_what_it_is():
    """The comparison above would also pass if options and channels both lost the same thing."""
    assert Compressed(compressor=RandK(3), shifted=True, mask_amplification=True).options() == {
        "privacy.trust": "untrusted",
        "algorithm.compressor": "rand-k",
        "algorithm.keep": 3,
        "algorithm.shifted": True,
        "privacy.mask_amplification": True,
    }
    assert Summed(grid=64).options()["algorithm.grid"] == 64
    assert Careful().options() == {"privacy.trust": f"{__name__}:Careful", "privacy.margin": 2.0}


SPIDER = {"rounds": 4, "restart": 2, "step_size": 0.3, "clip": 1.0, "clip_difference": 0.5}


def spider(**changes: Any):
    return silodp.algorithms.Spider(**(SPIDER | changes))


def test_objects_become_the_config_that_a_file_says():
    made = config_from(
        algorithm=spider(),
        channel=Compressed(compressor=RandK(2), shifted=True),
        epsilon=2.0,
        delta=1e-4,
        seed=5,
        model={"kind": "mlp", "hidden": [3]},
        data={"source": "wbcd", "silos": 4},
        privacy={"split": "optimal"},
        run={"every": 2},
    )
    said = {
        "data": {"source": "wbcd", "silos": 4},
        "model": {"kind": "mlp", "hidden": [3]},
        "privacy": {"trust": "untrusted", "epsilon": 2.0, "delta": 1e-4, "split": "optimal"},
        "algorithm": SPIDER | {"name": "spider", "compressor": "rand-k", "keep": 2, "shifted": True},
        "run": {"seed": 5, "every": 2},
    }
    assert made == parse_config(said)
    assert to_toml(made) == to_toml(parse_config(said))


def test_both_ways_train_the_same_model(tmp_path):
    data = made_data()
    objects = silodp.train(
        algorithm=spider(), channel=Trusted(), epsilon=3.0, model="logistic", data=data, seed=1, out=tmp_path / "a"
    )
    said = {"model": {"kind": "logistic"}, "privacy": {"trust": "trusted", "epsilon": 3.0}, "run": {"seed": 1}}
    config = silodp.train({**said, "algorithm": {"name": "spider", **SPIDER}}, data=data, out=tmp_path / "b")
    assert objects.config == config.config
    assert (tmp_path / "a" / "config.toml").read_text() == (tmp_path / "b" / "config.toml").read_text()
    assert eqx.tree_equal(objects.params, config.params)


def test_a_model_may_be_an_object(tmp_path):
    model = silodp.from_loss(
        lambda params, record: jnp.square(record[0] @ params["w"] - record[1]), lambda key: {"w": jnp.zeros(5)}
    )
    options = silodp.algorithms.DPGD(rounds=2, step_size=0.1, clip=1.0)
    run = silodp.train(algorithm=options, epsilon=3.0, model=model, data=made_data(), out=tmp_path / "run")
    assert run.params["w"].shape == (5,)


def test_sweep_and_account_take_the_same_keywords():
    data = made_data()
    asked: dict[str, Any] = {"algorithm": spider(), "channel": Untrusted(), "epsilon": 3.0, "delta": 1e-4, "data": data}
    outcomes = silodp.sweep(**asked, grid={"algorithm.step_size": [0.1, 0.2]})
    told = silodp.account(**asked)
    assert [o.values["algorithm.step_size"] for o in outcomes] == [0.1, 0.2]
    assert [silo["records"] for silo in told["silos"]] == list(data.sizes)
    assert outcomes[0].epsilon == pytest.approx(max(silo["epsilon"] for silo in told["silos"]), rel=1e-5)


def test_account_takes_the_parameters_of_a_shuffled_run_from_its_model():
    asked: dict[str, Any] = {"algorithm": spider(weights="size"), "channel": Shuffled(), "epsilon": 3.0}
    by_data = silodp.account(**asked, data=made_data())  # five features and a bias
    told = silodp.account(**asked, data={"sizes": list(made_data().sizes)}, model={"parameters": 6})
    assert by_data["silos"] == told["silos"]
    with pytest.raises(ConfigError, match=r"model\.parameters is missing"):
        silodp.account(**asked, data={"sizes": [40, 25]})


NOISY = Untrusted(multipliers={"value": jnp.ones(3)})
REFUSED = {
    "both": (({"algorithm": {"name": "spider"}},), {"epsilon": 1.0}, "epsilon: given beside a config"),
    "both, a section": (({"algorithm": {"name": "spider"}},), {"model": "mlp"}, "model: given beside a config"),
    "neither": ((), {}, "algorithm is missing: give a config, or"),
    "twice": ((), {"algorithm": "spider", "channel": Trusted(), "privacy": {"trust": "untrusted"}}, "given twice"),
    "twice, a number": ((), {"algorithm": "spider", "epsilon": 1.0, "privacy": {"epsilon": 2.0}}, "given twice"),
    "another channel": (
        (),
        {"algorithm": {"name": "spider", "compressor": "natural"}, "channel": Untrusted()},
        "channel = Untrusted: with these options it would be Compressed",
    ),
    "noise of one's own": ((), {"algorithm": "spider", "channel": NOISY}, "holds values that a plan fills in"),
    "a level of one's own": ((), {"algorithm": "spider", "channel": Shuffled(eps0=9.0)}, "that a plan fills in"),
    "an unknown trust": ((), {"algorithm": "spider", "channel": "blind"}, "privacy.trust = 'blind': unknown"),
    "an unknown name": ((), {"algorithm": "spidr"}, "did you mean spider"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("function", ["train", "sweep", "account"])
def test_what_contradicts_itself_is_refused(function, case):
    args, kwargs, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        getattr(silodp, function)(*args, **kwargs)


@pytest.mark.parametrize(
    ("option", "channel", "text"),
    [
        ({"compressor": "natural"}, "Careful", "Careful sends uncompressed messages"),
        ({"randomizer": "pvec"}, "Listening", "Listening sends each record's message"),
        ({}, "Packing", r"algorithm\.compressor is missing: Packing needs one"),
    ],
)
def test_a_channel_from_outside_is_never_replaced_by_the_librarys(option, channel, text):
    """An option that the library serves by another class of its own must not drop the class from outside."""
    config = config_from(algorithm={"name": "spider", **option}, channel=f"{__name__}:{channel}")
    with pytest.raises(ConfigError, match=text):
        channel_of(config, find("spider"))


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilom'"):
        silodp.train(algorithm="spider", epsilom=1.0)  # type: ignore[call-arg]


def test_a_mistake_in_an_algorithms_options_is_found_at_once():
    with pytest.raises(ConfigError, match=r"algorithm\.clipp: unknown key \(did you mean clip\?\)"):
        silodp.algorithms.Spider(clipp=1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.rounds = 0: must be .*at least 1"):
        silodp.algorithms.Spider(rounds=0)


def test_a_class_inside_a_function_needs_a_name(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry.KINDS})

    class Hidden(Untrusted):
        pass

    with pytest.raises(ConfigError, match=r"silodp\.register"):
        Hidden().options()
    silodp.register("hidden-for-a-test", Hidden)
    assert Hidden().options() == {"privacy.trust": "hidden-for-a-test"}
    assert isinstance(config_from(algorithm="spider", channel=Hidden()), Config)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"algorithm": silodp.algorithms.Spider}, r"algorithm = .*must be a dict of the section's keys, a name"),
     ({"algorithm": "dp-gd", "data": "wbcd"}, r"data = 'wbcd': must be a dict .*, e\.g\. \{\"source\": \"wbcd\"\}"),
     ({"algorithm": "dp-gd", "channel": silodp.channels.Untrusted}, r"channel = Untrusted: is a class; give an object"),
     ({"algorithm": "dp-gd", "run": 3}, "run = 3: must be a dict of the section's keys")],
)  # fmt: skip
def test_what_is_no_object_is_told_with_what_would_be(given, words):
    with pytest.raises(ConfigError, match=words):
        silodp.train(**given)


def test_channels_are_listed():
    assert {"Trusted", "Untrusted", "Compressed", "Shuffled", "Summed"} <= set(dir(silodp.channels))
