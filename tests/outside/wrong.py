"""Three mistakes that once were certified."""

from silodp.algorithms.gradient import GradientDescent
from silodp.core import Public, Release


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
