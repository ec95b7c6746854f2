"""Local randomizers for vectors of norm at most `clip`: eps0-LDP and unbiased.

Both first turn a vector x of norm below the clip C into +-C x/|x|, plus with probability 1/2 +
|x|/(2C), which keeps the mean; a zero vector becomes a fair coin on a fixed axis, and clip 0 gives
zeros. They differ in the law of the direction they send:

 - `Duchi` (Duchi, Jordan, Wainwright 2018; Algorithm 2 of the CE-PSGM paper): uniform on the
   sphere, on the input's side with probability e^eps0/(1 + e^eps0). Its level may be a traced
   scalar.
 - `PrivUnitG` (Asi, Feldman, Talwar 2022): a Gaussian vector whose component along the input lies
   above a threshold more often; the threshold is the best one for (eps0, d), found numerically.

Formal guarantee: the chances of a message under two inputs differ by a factor of at most e^eps0,
for every pair of inputs and every clip; where coins are real, in floating point too. Duchi's message
is plus or minus a vector that no record has a part in, so all its bits say no more than the sign.
PrivUnitG's is rounded to a public grid. The caller clips; a longer vector is treated as one of norm C.
"""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from silodp.privacy import halfspace
from silodp.privacy.clones import RandomizerName
from silodp.randomness import Randomness, Step

Records = Float[Array, "n d"]
Clip = float | Float[Array, ""]


class Randomizer(eqx.Module):
    """eps0-LDP, unbiased, for records of norm at most clip.

    Args:
        eps0: the level; `Randomizer(eps0)` is how a plan builds one.

    Example:
        >>> import silodp
        >>> issubclass(silodp.channels.Duchi, silodp.Randomizer)
        True
        >>> round(silodp.channels.Duchi(2.0).variance(dimension=10, clip=1.0), 2)
        24.76
    """

    hides: ClassVar[RandomizerName] = "clones"  # what the accountant knows of it beyond eps0
    traced_level: ClassVar[bool] = True  # whether eps0 may be a traced number

    def __init__(self, eps0: Any):
        raise NotImplementedError

    def randomize(self, vectors: Records, clip: Clip, random: Randomness, step: Step = 0) -> Records:
        """One message per record; `step` keeps the draws of different microbatches apart."""
        raise NotImplementedError

    def variance(self, dimension: int, clip: float) -> float:
        """E |message - x|^2 at |x| = clip (for shorter x it is larger by clip^2 - |x|^2)."""
        raise NotImplementedError


class Duchi(Randomizer):
    """Hemisphere sampling: right side with probability e^eps0/(1+e^eps0), constant length."""

    hides: ClassVar[RandomizerName] = "duchi"

    eps0: float | Float[Array, ""]

    def __init__(self, eps0: float | Float[Array, ""]):
        self.eps0 = eps0

    def randomize(self, vectors: Records, clip: Clip, random: Randomness, step: Step = 0) -> Records:
        unit = _on_sphere(vectors, clip, random, step)
        noise = random.normal("randomizer direction", vectors.shape, step)
        direction = noise / jnp.linalg.norm(noise, axis=1, keepdims=True)
        truthful = random.bits("randomizer side", vectors.shape[:1], step) < _truths(self.eps0)
        same_side = jnp.sum(direction * unit, axis=1) >= 0
        side = jnp.where(same_side == truthful, 1.0, -1.0)
        return (clip * _inverse_tanh_half(self.eps0) * _sphere_factor(vectors.shape[1])) * (side[:, None] * direction)

    def variance(self, dimension: int, clip: float) -> float:
        radius = _sphere_factor(dimension) / math.tanh(float(self.eps0) / 2)
        return clip**2 * (radius**2 - 1)


class PrivUnitG(Randomizer):
    """Half-space sampling of Gaussian vectors at the best threshold for (eps0, dimension)."""

    hides: ClassVar[RandomizerName] = "privunit"
    traced_level: ClassVar[bool] = False  # the threshold is found numerically

    eps0: float = eqx.field(static=True)

    def __init__(self, eps0: float):
        self.eps0 = eps0

    def randomize(self, vectors: Records, clip: Clip, random: Randomness, step: Step = 0) -> Records:
        unit = _on_sphere(vectors, clip, random, step)
        threshold = halfspace.best_threshold(self.eps0, vectors.shape[1])
        level = self.eps0 - vectors.shape[1] * 2.0**-31  # what rounding may cost where it is real (silodp.noise)
        share = halfspace.raised_share(threshold)
        above = math.exp(level) * share * halfspace.blanket(level, share)
        scale = clip / halfspace.mean_component(self.eps0, threshold)
        return scale * random.tilted("randomizer", unit, threshold, above, step)

    def variance(self, dimension: int, clip: float) -> float:
        threshold = halfspace.best_threshold(self.eps0, dimension)
        return clip**2 * (halfspace.second_moment(self.eps0, threshold, dimension) - 1)


def _on_sphere(vectors: Records, clip: Clip, random: Randomness, step: Step) -> Records:
    """Unit vectors +-x/|x| whose mean, times the clip, is x."""
    # In units of the clip: differences near convergence are so small that their squares underflow.
    vectors = vectors / jnp.where(jnp.asarray(clip) > 0, clip, 1.0)
    norms = jnp.linalg.norm(vectors, axis=1)
    axis = jnp.zeros(vectors.shape[1]).at[0].set(1.0)
    known = norms > 0
    unit = jnp.where(known[:, None], vectors / jnp.where(known, norms, 1.0)[:, None], axis)
    plus = random.uniform("randomizer norm", norms.shape, step) < (1.0 + norms) / 2.0
    return jnp.where(plus[:, None], unit, -unit)


def _sphere_factor(dimension: int) -> float:
    """1 / E|<v, u>| for v uniform on the sphere: sqrt(pi) Gamma((d+1)/2) / Gamma(d/2)."""
    log_ratio = math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2)
    return math.sqrt(math.pi) * math.exp(log_ratio)


def _truths(eps0: float | Float[Array, ""]) -> UInt32[Array, ""]:
    """Of 2^32 words, those that tell the right side: at most e^eps0 times those that do not, also in float32."""
    lies = 1.0 / (1.0 + jnp.exp(jnp.asarray(eps0, jnp.float32)))
    return ~(lies * (1 + 2.0**-18) * 2.0**32).astype(jnp.uint32)


def _inverse_tanh_half(eps0: float | Float[Array, ""]) -> Float[Array, ""]:
    """(e^eps0 + 1)/(e^eps0 - 1)."""
    return 1.0 / jnp.tanh(jnp.asarray(eps0, jnp.float32) / 2)
