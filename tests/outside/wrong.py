"""Mistakes that once were certified."""

from typing import ClassVar

import jax.numpy as jnp

from silodp.algorithms.gradient import GradientDescent, State
from silodp.channels import Untrusted
from silodp.channels.channel import Noised, evaluated
from silodp.core import POINT
from silodp.facts import Stream
from silodp.releases import Public, Release


class RawPublic(GradientDescent):
    """Calls the raw mean public."""

    def value(self, silo, x):
        return Public(silo.mean([x], [1.0], self.clip, "value", self.batch).release().value)


class SmallBound(GradientDescent):
    """States a bound that is a hundred times too small."""

    def value(self, silo, x):
        made = silo.mean([x], [1.0], self.clip, "value", self.batch).release()
        return Release(made.value, made.bound / 100, "value")


class Silent(GradientDescent):
    """Declares nothing."""

    def releases(self, silo, sizes, rounds):
        return []


class Unlisted(GradientDescent):
    """Asks what `queries` does not name, so that nobody has looked at it."""

    def round(self, state, fed):
        fed.mean(self.value, state.x)
        return State(state.x - self.step_size * fed.mean(self.other, state.x))

    def other(self, silo, x):
        return Public(silo.mean([x], [1.0], self.clip, "value", self.batch).release().value)


class Reader(GradientDescent):
    """Reads the records of a simulation past all questions."""

    def round(self, state, fed):
        return State(fed.mean(self.value, state.x) + fed.data.records[0].mean())


class Twice(GradientDescent):
    """Asks twice a round and has one stream for both."""

    queries: ClassVar = {"value": (POINT,), "again": (POINT,)}

    def round(self, state, fed):
        half = state.x - self.step_size * fed.mean(self.value, state.x)
        return State(state.x - self.step_size * fed.mean(self.again, half))

    def again(self, silo, x):
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def stream_of(self, query):
        return "value"

    def releases(self, silo, sizes, rounds):
        return [Stream("value", 2 * len(rounds), self.batch)]


class Uneven(GradientDescent):
    """Another stream for one silo than for the others."""

    def releases(self, silo, sizes, rounds):
        return [Stream("value" if silo == 0 else "other", len(rounds), self.batch)]


class Shrinking(GradientDescent):
    """A clip that shrinks with the rounds, through zero."""

    def value(self, silo, x):
        return silo.mean([x], [1.0], self.clip * (1 - silo.round / 2), "value", self.batch)


class Bare(Untrusted):
    """Draws and counts noise, and sends the mean without it."""

    def send(self, answer, silo, memory):
        release = evaluated(answer)
        self.privatise_local(release, silo)
        return Noised(release.value, jnp.float32(0)), memory


class Late(Untrusted):
    """Sends a noised mean, and in the next round the mean itself beside it."""

    def remember(self, sizes):
        return {stream: jnp.zeros(size) for stream, size in sizes.items()}

    def send(self, answer, silo, memory):
        release = evaluated(answer)
        noised = self.privatise_local(release, silo) + memory[release.stream]
        return Noised(noised, jnp.float32(0)), memory | {release.stream: release.value}


class Thin(Untrusted):
    """A tenth of the noise that the target needs."""

    def joint(self, name, needed, declared):
        return needed / 10


class Unaccounted(Untrusted):
    """Leaves the last stream out of the account."""

    def accounted(self, declared, silo, streams):
        return super().accounted(declared, silo, streams[:-1])
