"""What happens to a record: gradient -> clip -> mean -> noise -> server -> step.

An `Algorithm` learns about data through a `Federation` only. The federation asks silos a *query*: a method of the
algorithm that runs inside a silo, sees public arguments and a `Silo`, and returns a `RecordMean` (a clipped mean of
per-record vectors, not yet evaluated), a `Release` made from one, or `Public` (made of what the silo has privatised
before). A `Channel` (silodp.channels) is the trust model: it turns answers into messages and messages into their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from silodp.facts import Stream
from silodp.gradients.blocks import SETTINGS
from silodp.prox import Prox
from silodp.randomness import Randomness
from silodp.releases import Account, Answer, Gradients, Public, RecordMean, Release, Scalar, Squares, Statistic, Vector
from silodp.sampling import Batch, BatchRule, Full
from silodp.server import Averaging, Decay, Optimiser

if TYPE_CHECKING:
    from silodp.channels.channel import Channel
    from silodp.objective import Objective

Shape = tuple[int | str, ...]  # of a public argument; "d" stands for the number of parameters
POINT: Shape = ("d",)
NUMBER: Shape = ()


class Site(eqx.Module):
    """What stays the same about a silo: its records (padded), their number, its place among the silos."""

    objective: Objective
    channel: Channel
    records: PyTree[Array]
    size: Int[Array, ""]
    index: Int[Array, ""]
    alone: bool = eqx.field(static=True, default=False)  # in a process of its own, where a server's word may be wrong


class Silo:
    """One silo's side of one round, as a query sees it. A query may replace `memory`; it stays in the silo.

    Args:
        site: its records and its place among the silos. round: counts from 0. randomness: the silo's own coins.
        memory: what it keeps between rounds. account: what it has released so far.

    Example (the private mean of the records' features, in one round):
        >>> import equinox as eqx, silodp
        >>> from silodp.sampling import Full
        >>> class State(eqx.Module):
        ...     x: object
        >>> class Features(silodp.Algorithm):
        ...     queries = {"features": ()}  # without public arguments
        ...     clip: object
        ...     def init(self, x0):
        ...         return State(x0)
        ...     def round(self, state, fed):
        ...         return State(fed.mean(self.features))
        ...     def features(self, silo):
        ...         return silo.statistic(lambda record: record[0], self.clip, "features")
        ...     def releases(self, silo, sizes, rounds):
        ...         return [silodp.Stream("features", len(rounds), Full())]
        >>> _ = silodp.register("features", Features)
        >>> outcomes = silodp.sweep(
        ...     algorithm={"name": "features", "rounds": 1, "step_size": 1.0, "clip": 9.0},
        ...     epsilon=5.0,
        ...     data={"source": "wbcd", "silos": 3, "preprocess": ["standardise"]},
        ...     model={"kind": "logistic", "bias": False},
        ...     grid={"run.seed": [0]},
        ... )
        >>> bool(abs(outcomes[0].x).max() < 1.0)  # standardised: the mean is zero
        True
    """

    def __init__(self, site: Site, round: Array, randomness: Randomness, memory: PyTree, account: Account):
        self.objective, self.channel, self.alone = site.objective, site.channel, site.alone
        self.records, self.size, self.index = site.records, site.size, site.index
        self.round, self.randomness, self.memory, self.account = round, randomness, memory, account

    def mean(
        self,
        points: Sequence[Vector],
        coefficients: Sequence[Any],
        clip: Any,
        stream: str,
        batch: BatchRule | Batch | None = None,
        step: Any = 0,
    ) -> RecordMean:
        """The clipped mean of sum_k c_k grad f(x_k; z) over a batch (drawn here when a rule is given)."""
        drawn = self._batch(batch, stream, step)
        self.account = self.account.work(len(points) * drawn.divisor)
        vectors = Gradients(self.objective, tuple(points), tuple(coefficients))
        return RecordMean(vectors, drawn, clip, stream)

    def statistic(
        self,
        function: Callable[[PyTree], Vector],
        clip: Any,
        stream: str,
        batch: BatchRule | Batch | None = None,
        step: Any = 0,
    ) -> RecordMean:
        """The clipped mean of any vector `function(record)` over a batch: a private mean that is no gradient."""
        return self._of_function(Statistic, function, clip, stream, batch, step)

    def squares(
        self,
        function: Callable[[PyTree], Vector],
        clip: Any,
        stream: str,
        batch: BatchRule | Batch | None = None,
        step: Any = 0,
    ) -> RecordMean:
        """The mean of v v^T over a batch, v = function(record) clipped to |v|^2 <= clip: a private second moment.

        It comes as a vector (`silodp.releases.unpacked` makes it a matrix), and moves less than other means do.
        """
        return self._of_function(Squares, function, clip, stream, batch, step)

    def _of_function(
        self,
        kind: type[Statistic | Squares],
        function: Callable[[PyTree], Vector],
        clip: Any,
        stream: str,
        batch: BatchRule | Batch | None,
        step: Any,
    ) -> RecordMean:
        vectors = kind(function, self._length(function, stream))
        return RecordMean(vectors, self._batch(batch, stream, step), clip, stream)

    def _length(self, function: Callable[[PyTree], Vector], stream: str) -> int:
        record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.records)
        shape = jax.eval_shape(function, record).shape
        if len(shape) != 1:
            raise ValueError(f"statistic of stream {stream!r}: gives shape {shape}; return a vector (ravel it)")
        return shape[0]

    def _batch(self, batch: BatchRule | Batch | None, stream: str, step: Any) -> Batch:
        rule = Full() if batch is None else batch
        return rule if isinstance(rule, Batch) else rule.draw(self, self.channel.batch_name(stream), step)

    def privatise(self, answer: RecordMean | Release, step: Any = 0) -> Vector:
        """A local step's clipped mean with this silo's own noise: a release of its own, counted."""
        release = answer if isinstance(answer, Release) else answer.release()
        return self.channel.privatise_local(release, self, step)

    def saw(self, release: Release, noised: Vector) -> None:
        """For an auditor's silo, which looks at every release with its noise; a real one keeps nothing of it."""

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """`yes()` or a cheap `no()`, with the work done inside counted.

        Of settings that are swept together all compute `yes()` when one needs it, none when none does.
        """

        def branch(run: Callable[[], Any]) -> Callable[[Account], tuple[Any, Account]]:
            def traced(account: Account) -> tuple[Any, Account]:
                self.account = account
                return run(), self.account

            return traced

        def each(account: Account) -> tuple[Any, Account]:
            return jax.tree.map(partial(jnp.where, predicate), branch(yes)(account), branch(no)(account))

        value, self.account = jax.lax.cond(in_any_setting(predicate), each, branch(no), self.account)
        return value

    def loop(self, steps: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """carry = body(k, carry) for k < steps, with the releases made inside counted."""

        def step(k: Array, packed: tuple[Account, Any]) -> tuple[Account, Any]:
            self.account, inner = packed
            inner = body(k, inner)
            return self.account, inner

        self.account, carry = jax.lax.fori_loop(0, steps, step, (self.account, carry))
        return carry


def in_any_setting(predicate: Any) -> Any:
    """Whether the predicate holds in any of the settings that are swept together."""
    try:
        return jax.lax.pmax(jnp.int32(predicate), SETTINGS) > 0
    except NameError:  # there is no such axis: not a sweep
        return predicate


def ask(
    query: Callable[..., Answer], public: tuple[Array, ...], silo: Silo, wire: PyTree
) -> tuple[PyTree, PyTree, Account, PyTree]:
    """A silo's whole side of a question, compiled or in a process of its own.

    Returns the message, the silo's memory and account, and its end of the channel.
    """
    message, wire = silo.channel.send(query(silo, *public), silo, wire)
    return message, silo.memory, silo.account, wire


def privatised(answer: Answer) -> Vector:
    """What a local task may return: nothing but what the silo has noised itself."""
    if not isinstance(answer, Public):
        raise TypeError("a local task must return Public: what it computes leaves the silo without further noise")
    return answer.value


@runtime_checkable
class Federation(Protocol):
    """An algorithm's only access to data. `round` counts from 0 and is public, as is every argument of a query.

    Example (one that answers without silos, for a test of an algorithm's arithmetic):
        >>> import jax.numpy as jnp, silodp
        >>> from silodp.algorithms.gradient import GradientDescent
        >>> from silodp.prox import build_prox
        >>> class Ones(silodp.Federation):
        ...     round, silos, present = 0, 1, (0,)
        ...     def mean(self, query, *public):
        ...         return jnp.ones(2)
        >>> descent = GradientDescent(jnp.float32(0.5), build_prox("none"), clip=1.0)
        >>> descent.round(descent.init(jnp.zeros(2)), Ones()).x.tolist()
        [-0.5, -0.5]
    """

    round: Any
    silos: int
    present: Any  # indices of the silos that take part in this round

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        """Ask this round's silos and return the private weighted mean of their answers."""
        ...

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        """Let one silo work on its own, on public arguments; what it returns it has privatised itself."""
        ...

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """`yes()` or `no()`, only one of which is executed; both may ask silos."""
        ...

    def coin(self, purpose: str) -> Scalar:
        """A public uniform number of this round, drawn by the server."""
        ...


class Algorithm(eqx.Module):
    """`init(x0)` and `round(state, fed)`. Scalars that may be swept are traced; shapes and counts are static.

    Args:
        step_size, prox: every algorithm has them; a subclass adds fields, named as the options of a config.

    Example:
        >>> import equinox as eqx, silodp, tempfile
        >>> from silodp.algorithms.gradient import State
        >>> from silodp.core import POINT
        >>> from silodp.sampling import Full
        >>> class Halving(silodp.Algorithm):
        ...     queries = {"value": (POINT,)}  # a silo refuses all other questions
        ...     clip: object
        ...     restart: int = eqx.field(static=True)
        ...     def init(self, x0):
        ...         return State(x0)
        ...     def round(self, state, fed):
        ...         step = self.step_size / 2.0 ** (fed.round // self.restart)
        ...         return State(state.x - step * fed.mean(self.value, state.x))
        ...     def value(self, silo, x):
        ...         return silo.mean([x], [1.0], self.clip, "value")
        ...     def releases(self, silo, sizes, rounds):
        ...         return [silodp.Stream("value", len(rounds), Full())]
        >>> _ = silodp.register("halving", Halving)
        >>> run = silodp.train(
        ...     algorithm={"name": "halving", "rounds": 4, "step_size": 0.5, "clip": 1.0, "restart": 2},
        ...     channel="trusted",
        ...     epsilon=2.0,
        ...     data={"source": "wbcd", "silos": 3, "preprocess": ["standardise"]},
        ...     out=tempfile.mkdtemp(),
        ... )
        >>> round(run.summary["epsilon"], 3)
        2.0
    """

    # The methods that a silo answers (it refuses all others), each with the shapes of its public arguments.
    queries: ClassVar[Mapping[str, tuple[Shape, ...]]] = {}
    # Of an algorithm from outside: fields of its registry entry (silodp.algorithms.Entry).
    entry: ClassVar[Mapping[str, Any]] = {}

    # Whether steps are taken by `stepped`: only then has a server optimiser, a decay or a public penalty an effect.
    steps: ClassVar[bool] = False

    step_size: Scalar
    prox: Prox
    # What the theorem's output is drawn from: "before" (x_0 .. x_{R-1}), "after" (x_1 .. x_R), "local" (iterates of
    # local steps), or "last": not drawn.
    output: str = eqx.field(static=True, kw_only=True, default="after")
    optimiser: Optimiser | None = eqx.field(kw_only=True, default=None)
    step_decay: Decay | None = eqx.field(static=True, kw_only=True, default=None)
    # The part of the loss that no record has a say in: its gradient is added after clipping and noise.
    penalty: Callable[[Vector], Scalar] | None = eqx.field(static=True, kw_only=True, default=None)

    def init(self, x0: Vector) -> Any:
        raise NotImplementedError

    @property
    def psi(self) -> Prox:
        """The convex part of the objective: stationarity is measured by its gradient mapping."""
        return self.prox

    def result(self, state: Any) -> Vector:
        """What the run would return after this round."""
        return state.x

    def candidate(self, before: Any, after: Any) -> Vector:
        """The iterate of a round that a theorem's random output may be."""
        return before.x if self.output == "before" else after.x

    def check(self, rounds: int) -> None:
        """Refuse (ValueError) options that do not go together, or so many rounds."""

    def rate(self, round: Any) -> Any:
        """The step size of a round."""
        return self.step_size if self.step_decay is None else self.step_size * self.step_decay(round)

    def opened(self, x0: Vector) -> PyTree:
        """What the server's optimiser keeps, before the first step."""
        return () if self.optimiser is None else self.optimiser.open(x0)

    def slope(self, x: Vector, v: Vector, weight: Any = 1.0) -> Vector:
        """v with the penalty's gradient at x: public, so it needs neither clip nor noise."""
        return v if self.penalty is None else v + weight * jax.grad(self.penalty)(x)

    def stepped(self, x: Vector, v: Vector, round: Any, kept: PyTree = ()) -> tuple[Vector, PyTree]:
        """The server's step from x along the private estimate v, and what its optimiser keeps.

        All of it is computed from what is public already: it costs no privacy.
        """
        rate, direction = self.rate(round), self.slope(x, v)
        if self.optimiser is not None:
            direction, kept = self.optimiser(direction, kept)
        return self.prox(x - rate * direction, rate), kept

    def round(self, state: Any, fed: Federation) -> Any:
        raise NotImplementedError

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        """What a silo keeps for itself between rounds; it never leaves it."""
        return ()

    @property
    def together(self) -> int:
        """Streams that are released in the same round; a shuffled channel takes them from one batch."""
        return 1

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        """What the run releases about one silo's records when the silo takes part in these rounds."""
        raise NotImplementedError

    def shapes(self, query: str, parameters: int) -> list[tuple[int, ...]]:
        """Of a query's public arguments, for a model of so many parameters."""
        return [tuple(parameters if n == "d" else int(n) for n in shape) for shape in self.queries[query]]

    def stream_of(self, query: str) -> str:
        """The stream that a query's answer belongs to."""
        return query

    def optimal_shares(self, rounds: int) -> dict[str, float] | None:
        """Each stream's share of mu^2 that a guess of the run's path makes best; None: no guess."""
        return None


class Door:
    """A federation as an algorithm's `round` sees it: what message mode has too, and only questions that silos answer.

    What is not in `queries` nobody has followed (silodp.flow), so it must not be asked in a simulation either.
    """

    def __init__(self, fed: Federation, algorithm: Algorithm, parameters: int):
        self.round, self.silos, self.present = fed.round, fed.silos, fed.present
        self.cond, self.coin = fed.cond, fed.coin
        self._fed, self._algorithm, self._parameters = fed, algorithm, parameters

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        self._check(query, public)
        return self._fed.mean(query, *public)

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        self._check(task, public)
        return self._fed.local(index, task, *public)

    def _check(self, query: Callable[..., Answer], public: Sequence[Array]) -> None:
        name, known = getattr(query, "__name__", repr(query)), self._algorithm.queries
        if name not in known:
            raise ValueError(f"query {name!r}: silos answer {', '.join(known)}; add it to `queries`")
        given, declared = [jnp.shape(each) for each in public], self._algorithm.shapes(name, self._parameters)
        if given != declared:
            raise ValueError(f"query {name!r}: public arguments of shapes {given}; `queries` declares {declared}")


def distance(x: Vector, y: Vector) -> Scalar:
    """|x - y|; points closer than float32 can tell apart anywhere near 1 count as equal.

    A clip norm is a multiple of this distance. Were it so small that its products underflow, clipping and noise would
    silently vanish, and a server may send any two points it likes.
    """
    length = norm(x - y)
    return jnp.where(length < 1e-15, 0.0, length)


def norm(v: Vector) -> Scalar:
    """|v| without overflow or underflow on the way: points a millionth apart still have a distance."""
    largest = jnp.max(jnp.abs(v), initial=0.0)
    scale = jnp.where(largest > 0, largest, 1.0)
    return scale * jnp.sqrt(jnp.sum((v / scale) ** 2))


def averaged(output: Vector, x: Vector, done: Any, rounds: int, average: int | Averaging) -> Vector:
    """The result after so many rounds: the last iterate, the mean of the last `average` of them, or of all."""
    if average == 1:
        return x
    if isinstance(average, Averaging):
        return output + average(done) * (x - output)
    count = done - (rounds - average)  # of iterates in the mean, this one included
    return jnp.where(count > 1, output + (x - output) / jnp.maximum(count, 1), x)
