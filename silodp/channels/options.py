"""From the options of a config to a channel: trust model, compression, shuffling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from silodp.algorithms import find
from silodp.channels import (
    BinomialServer,
    Channel,
    CompressedServer,
    ShuffledServer,
    TrustedServer,
    UntrustedServer,
)
from silodp.compressors import Compressor, build_compressor
from silodp.config import AlgorithmConfig, Config, ConfigError
from silodp.core import Algorithm, Stream
from silodp.privacy.binomial import dominating_gaussian, gaussian_multiplier, sensitivity
from silodp.privacy.plan import LOCAL, Shuffle
from silodp.shuffle.binomial import PVec

GRID = 200  # rounding levels of P_vec unless the config says otherwise


def channel_of(
    config: Config, noise: Mapping[str, Any], algorithm: Algorithm, sizes: Sequence[int], parameters: int
) -> Channel:
    """The channel of a run; `noise` holds the plan's multipliers by stream."""
    trust, multipliers = config.privacy.trust, dict(noise)
    compression = compression_of(config.algorithm, trust, parameters)
    streams = algorithm.releases(0, tuple(sizes), range(config.algorithm.rounds))
    if compression is not None:
        names = tuple(stream.name for stream in streams)
        return CompressedServer(multipliers, compressor=compression[0], shifted=compression[1], streams=names)
    shuffle = shuffle_of(config, parameters)
    if shuffle is None:
        return (TrustedServer if trust == "trusted" else UntrustedServer)(multipliers)
    if shuffle.randomizer == "pvec":
        protocols = {
            s.name: protocol(s, config, sizes, multipliers.get(s.name), shuffle)
            for s in streams
            if s.count and s.name != "local"
        }
        return BinomialServer(multipliers, protocols=protocols)
    fixed = shuffle.randomizer == "privunit" and "message" in multipliers
    eps0 = 1 / float(np.asarray(multipliers["message"])[0]) if fixed else None
    return ShuffledServer(multipliers, randomizer=shuffle.randomizer, eps0=eps0)


def compression_of(options: AlgorithmConfig, trust: str, parameters: int) -> tuple[Compressor, bool] | None:
    """The compressor and whether it works against a shift; None: messages are sent as they are."""
    implied = find(options.name).compression
    if options.compressor is None:
        if implied in ("plain", "shifted"):
            raise ConfigError(
                f"algorithm.compressor is missing: {options.name} needs one of identity, rand-k, qsgd, natural"
            )
        return None
    if implied == "none":
        raise ConfigError(f"algorithm.compressor = {options.compressor!r}: {options.name} sends uncompressed messages")
    if trust != "untrusted":
        raise ConfigError(
            f"algorithm.compressor = {options.compressor!r}: needs privacy.trust = 'untrusted', where a message is "
            "private before it is compressed"
        )
    if options.shifted is not None and implied in ("plain", "shifted") and options.shifted != (implied == "shifted"):
        raise ConfigError(f"algorithm.shifted = {options.shifted}: {options.name} compresses {implied}")
    try:
        compressor = build_compressor(options.compressor, options.keep, options.levels)
        compressor.omega(parameters)
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from None
    return compressor, options.shifted if options.shifted is not None else implied == "shifted"


def shuffle_of(config: Config, parameters: int | None) -> Shuffle | None:
    """How records are hidden before the shuffler; None under the other trust models."""
    options, entry = config.algorithm, find(config.algorithm.name)
    if config.privacy.trust != "shuffled":
        if options.randomizer is not None or options.grid is not None:
            raise ConfigError(f"algorithm.randomizer = {options.randomizer!r}: needs privacy.trust = 'shuffled'")
        return None
    if parameters is None:
        raise ConfigError("model.parameters is missing: the noise of shuffled messages depends on it")
    if entry.randomizer == "pvec" and options.randomizer not in (None, "pvec"):
        raise ConfigError(f"algorithm.randomizer = {options.randomizer!r}: {options.name} uses pvec; leave it out")
    if options.grid is not None and options.grid % 2:
        raise ConfigError(f"algorithm.grid = {options.grid}: give an even number of levels")
    return Shuffle(options.randomizer or entry.randomizer, parameters, options.grid or GRID)


def check_shuffle(config: Config, algorithm: Algorithm, sizes: Sequence[int], weights: np.ndarray) -> None:
    """All messages count alike: a silo's weight must be its share of the messages."""
    if config.privacy.trust != "shuffled":
        return
    for stream in algorithm.releases(0, tuple(sizes), range(config.algorithm.rounds)):
        sent = np.array([stream.batch.divisor(size) for size in sizes])
        alike = np.allclose(sent / sent.sum(), weights / weights.sum(), rtol=1e-6)
        if stream.name != LOCAL and not alike:
            raise ConfigError(
                f"algorithm.weights = {config.algorithm.weights!r}: under a shuffler every message counts alike; "
                "use 'size' with full batches, 'equal' with algorithm.batch"
            )


def protocol(stream: Stream, config: Config, sizes: Sequence[int], multipliers: Any, shuffle: Shuffle) -> PVec:
    """P_vec with the fewest coins that give the planned multiplier, also when the smallest silos take part."""
    sent = [round(stream.batch.divisor(size)) for size in sizes]
    records = sum(sorted(sent)[: config.algorithm.participation or len(sizes)])
    needed = 0.0 if multipliers is None else float(np.max(np.asarray(multipliers)))
    target = (2 * needed * sensitivity(shuffle.levels, shuffle.parameters)) ** 2
    per_record = max(2, 2 * int(np.ceil(max(target, 2000) / records / 2)))
    while gaussian_multiplier(per_record * records, shuffle.levels, shuffle.parameters) < needed:
        per_record += max(2, 2 * (per_record // 20_000))
    if multipliers is not None:
        check_tail(stream, config, per_record * records, shuffle)
    try:
        return PVec(shuffle.levels, per_record, sent)
    except ValueError as error:
        raise ConfigError(f"algorithm.grid: {error}") from None


def check_tail(stream: Stream, config: Config, coins: int, shuffle: Shuffle) -> None:
    """The coins are no worse than a Gaussian but for a far tail, which must not matter beside delta."""
    lost = dominating_gaussian(coins, sensitivity(shuffle.levels, shuffle.parameters)).lost
    if lost * stream.count * shuffle.parameters > 1e-6 * config.privacy.delta:
        raise ConfigError(
            f"privacy.epsilon = {config.privacy.epsilon}: too large for pvec's few coins at delta "
            f"{config.privacy.delta:g}; use algorithm.randomizer = 'duchi'"
        )
