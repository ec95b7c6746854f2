"""`silodp check`: the checks that the library's own parts pass, run on a part from outside.

An algorithm, a trust model, a compressor or a randomizer is run on a small made table of five features: it must build,
let nothing of the records out (silodp.flow), release what it declares, resume to the same bits, give the same result
message by message, keep its bounds on neighbouring inputs (silodp.audit.neighbours), and withstand the audit. What
passed is remembered by the hash of its source (silodp.vouched); certificates then say so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from silodp import registry, vouched
from silodp.algorithms import find
from silodp.audit.neighbours import Moved, measured_sensitivity
from silodp.audit.real import SiloHere
from silodp.audit.rows import OK
from silodp.audit.table import audit, audit_case, cases_of, trusts_of
from silodp.compressors import Compressor
from silodp.data import FederatedData, SiloData
from silodp.deploy.links import Link, SiloProcess
from silodp.deploy.pipes import joined, outside_names, portable
from silodp.errors import ConfigError
from silodp.parse import parse_config
from silodp.plan.certificate import settle
from silodp.plan.plan import Plan
from silodp.randomness import SeededRandomness
from silodp.run.directory import RunDirectory
from silodp.run.prepare import Prepared, prepare
from silodp.run.simulate import Carry, Compiled, begin, compile_run, simulate

SIZES, FEATURES, ROUNDS = (40, 25, 31), 5, 6
# Pairs of records, longer than any clip: with opposite gradients, and with different squares.
EXTREMES = (((1e3,) * FEATURES, (-1e3,) * FEATURES), ((1e3, *(0.0,) * (FEATURES - 1)), (0.0,) * FEATURES))
RELATIVE, ABSOLUTE = 1e-5, 1e-5  # that message mode may differ from the simulation by


@dataclass(frozen=True)
class Finding:
    """One check under one trust model."""

    trust: str
    check: str
    passed: bool
    words: str = ""


def small_data() -> FederatedData:
    """Unbalanced silos of a noisy linear rule, two classes."""
    rng = np.random.default_rng(0)
    rule = rng.normal(size=FEATURES)

    def silo(name: str, n: int) -> SiloData:
        x = rng.normal(size=(n, FEATURES)).astype(np.float32)
        return SiloData(name, x, (x @ rule > 0).astype(np.int32))

    silos = tuple(silo(f"silo {i}", n) for i, n in enumerate(SIZES))
    return FederatedData("made", silos, None, "classification", ("0", "1"), ())


def check(name: str, options: dict[str, Any] | None = None) -> list[Finding]:
    """Every check of the part that `name` stands for; `options`: config keys of its section that it needs to run."""
    kind, part = kind_of(name)
    findings = list(CHECKS[kind](name, options or {}))
    if findings and all(finding.passed for finding in findings):
        tried = (dict(find(name).example) if kind == "algorithm" else {}) | (options or {})
        vouched.record(getattr(part, "build", part), {"name": name, "kind": kind}, tried)
    return findings


def kind_of(name: str) -> tuple[str, Any]:
    """The kind of part that a name stands for, by what it is made of."""
    for kind in CHECKS:
        if registry.is_known(kind, name):
            part = registry.find(kind, name)
            made = getattr(part, "build", part)
            if ":" not in name or registry.kind_of(made) == kind:
                return kind, part
    raise ConfigError(f"check: {name!r} is no algorithm, trust model, compressor or randomizer")


def check_algorithm(name: str, options: dict[str, Any]) -> Iterator[Finding]:
    entry, parties = find(name), Parties()
    with parties:
        for trust in trusts_of(entry):
            yield from checked_run({"name": name} | dict(entry.example) | options, trust, parties=parties)
    for row in audit([name], options=options):
        words = f"claim {row.claim_mu:.3f}, measured {row.measured_mu:.3f} +- {row.standard_error:.3f}"
        yield Finding(row.trust, "audit", row.verdict == OK, f"{words}: {row.verdict}")


def check_channel(name: str, options: dict[str, Any]) -> Iterator[Finding]:
    yield from checked_run({"name": "dp-gd", "clip": 1.0}, name, options)
    own = {f"privacy.{key}": value for key, value in options.items()}
    for case in cases_of("dp-gd", [name], own):
        row = audit_case(case)
        yield Finding(name, "audit", row.verdict == OK, row.verdict)


def check_compressor(name: str, options: dict[str, Any]) -> Iterator[Finding]:
    run = {"name": "dp-gd", "clip": 1.0, "compressor": name} | options
    yield from checked_run(run, "untrusted")
    prepared = prepare(config_of(run, "untrusted", {}), small_data())
    compressor = prepared.plan.channel.compressor  # type: ignore[attr-defined]
    yield told("untrusted", "what is decoded is what was sent", lambda: check_bytes(compressor))


def check_randomizer(name: str, options: dict[str, Any]) -> Iterator[Finding]:
    yield from checked_run({"name": "dp-gd", "clip": 1.0, "randomizer": name} | options, "shuffled")


CHECKS: dict[str, Callable[[str, dict[str, Any]], Iterator[Finding]]] = {
    "algorithm": check_algorithm,
    "channel": check_channel,
    "compressor": check_compressor,
    "randomizer": check_randomizer,
}


def config_of(options: dict[str, Any], trust: str, own: dict[str, Any]) -> Any:
    algorithm = {"rounds": ROUNDS, "step_size": 0.3} | options
    privacy = {"trust": trust, "epsilon": 4.0, "delta": 1e-4} | own
    run = {"every": 2, "seed": 3, "mode": "messages", "test_seed": True}
    return parse_config({"privacy": privacy, "algorithm": algorithm, "run": run})


class Parties(ExitStack):
    """Silos for message mode. One is a process, which must find the part by itself; the others save their start.

    The noise is seeded, so that they take a new plan when one is sent: the same silos serve all trust models.
    """

    silos: tuple[Link, ...] = ()

    def of(self, plan: Plan) -> tuple[Link, ...]:
        if not self.silos:
            process = self.enter_context(SiloProcess(outside_names(portable(plan.config))))
            self.silos = (process, *(self.enter_context(SiloHere()) for _ in SIZES[1:]))
        return self.silos


def checked_run(
    options: dict[str, Any], trust: str, own: dict[str, Any] | None = None, parties: Parties | None = None
) -> Iterator[Finding]:
    """The checks of one combination; when it cannot be built the others are left out."""
    made: list[Prepared] = []
    built = told(trust, "builds, lets nothing out", lambda: made.append(prepared_for(options, trust, own or {})))
    yield built
    if not built.passed:
        return
    prepared = made[0]
    ran: list[Ran] = []
    yield told(trust, "releases what it declares", lambda: ran.append(finished(prepared)))
    if not ran:
        return
    yield told(trust, "resumes to the same bits", lambda: check_resumed(prepared, ran[0]))
    with Parties() if parties is None else nullcontext(parties) as asked:
        yield told(trust, "message mode is the simulation", lambda: check_messages(prepared, ran[0].carries[-1], asked))
    if prepared.plan.channel.gaussian:
        yield told(trust, "bounds hold on neighbours", lambda: check_neighbours(prepared))


def told(trust: str, check: str, run: Callable[[], Any]) -> Finding:
    """What a check found; anything that a part from outside raises is a finding."""
    try:
        words = run()
    except Exception as error:
        return Finding(trust, check, False, f"{type(error).__name__}: {error}")
    return Finding(trust, check, True, words if isinstance(words, str) else "")


def prepared_for(options: dict[str, Any], trust: str, own: dict[str, Any]) -> Prepared:
    return prepare(config_of(options, trust, own), small_data())


class Ran(NamedTuple):
    """A program, and the run after each chunk."""

    compiled: Compiled
    carries: Sequence[Carry]


def finished(prepared: Prepared) -> Ran:
    """An error when the run released anything but what was declared."""
    carries: list[Carry] = []
    carry, _ = begin(prepared.problem, prepared.setting, sweep=False)
    compiled = compile_run(prepared.problem, prepared.setting, carry, sweep=False)
    simulate(prepared.problem, prepared.setting, carry, compiled, lambda chunk: carries.append(chunk.carry))
    settle(prepared.plan, carries[-1].ends.accounts)
    return Ran(compiled, carries)


def check_resumed(prepared: Prepared, ran: Ran) -> None:
    """From a checkpoint on disk; the program is the same."""
    problem, setting, carries = prepared.problem, prepared.setting, ran.carries
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory.create(Path(folder) / "run", prepared.config, "check")
        directory.save_checkpoint(carries[0], 1)
        saved = directory.load_checkpoint(carries[-1])
    assert saved is not None
    again = simulate(problem, setting, saved[0], ran.compiled, lambda chunk: None)
    if not np.array_equal(np.asarray(again.state.x), np.asarray(carries[-1].state.x)):
        raise AssertionError("a resumed run ends at another point")


def check_messages(prepared: Prepared, expected: Carry, parties: Parties) -> str:
    plan, x0 = prepared.plan, prepared.setting.x0
    records = [{"features": silo.features, "targets": silo.targets} for silo in prepared.data.silos]
    with joined(plan, parties.of(plan), records, plan.config.run.seed) as fed:
        *_, last = fed.rounds(plan.algorithm, x0)
        settle(plan, fed.final_accounts())
    apart = float(jnp.max(jnp.abs(last.x - expected.state.x)))
    if not np.allclose(last.x, expected.state.x, RELATIVE, ABSOLUTE):
        raise AssertionError(f"coordinates differ by up to {apart:.3g}")
    return f"largest difference {apart:.1e}"


def check_neighbours(prepared: Prepared) -> str:
    moved = Moved()
    for pair in EXTREMES:
        one, other = ((jnp.asarray(features), jnp.int32(1)) for features in pair)
        moved.join(measured_sensitivity(prepared, ROUNDS, one, other))
    if moved.exceeded:
        raise AssertionError(f"moves by more than its bound: {moved.exceeded}")
    return ", ".join(f"{stream} at most {ratio:.3f} of its bound" for stream, ratio in moved.worst.items())


def check_bytes(compressor: Compressor, size: int = 64) -> None:
    v = jnp.asarray(np.random.default_rng(1).normal(size=size), jnp.float32)
    for seed in range(5):
        coins = lambda seed=seed: SeededRandomness(jax.random.key(seed))
        sent = compressor.encode(v, coins())
        if 8 * len(sent) != compressor.bits(size):
            raise AssertionError(f"{8 * len(sent)} bits sent, {compressor.bits(size)} declared")
        np.testing.assert_allclose(compressor.decode(sent, size), compressor(v, coins()), rtol=1e-6)
