"""TRUST: a file for each trust model, with everything that differs by it: what is checked and accounted, who is
protected by how much, the words of the certificate, both ends of the channel, and what an auditor sees.

Example:
    >>> import silodp
    >>> from silodp.compressors import RandK
    >>> for channel in (silodp.channels.Trusted(), silodp.channels.Compressed(compressor=RandK(keep=5))):
    ...     print(channel.options())
    {'privacy.trust': 'trusted'}
    {'privacy.trust': 'untrusted', 'algorithm.compressor': 'rand-k', 'algorithm.keep': 5, 'algorithm.shifted': False}
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silodp.channels.aggregated import Aggregated
    from silodp.channels.channel import Channel, Packed, Wishes, privatise
    from silodp.channels.compressed import Compressed
    from silodp.channels.pvec import Summed
    from silodp.channels.randomizers import Duchi, PrivUnitG, Randomizer
    from silodp.channels.shuffled import Shuffled
    from silodp.channels.trusted import Trusted
    from silodp.channels.untrusted import Untrusted

# Loaded on first use: a shuffler's process opens sealed messages' envelopes without JAX.
_HOMES = {
    "Aggregated": "aggregated",
    "Channel": "channel",
    "Compressed": "compressed",
    "Duchi": "randomizers",
    "Packed": "channel",
    "PrivUnitG": "randomizers",
    "Randomizer": "randomizers",
    "Shuffled": "shuffled",
    "Summed": "pvec",
    "Trusted": "trusted",
    "Untrusted": "untrusted",
    "Wishes": "channel",
    "privatise": "channel",
}

__all__ = [
    "Aggregated",
    "Channel",
    "Compressed",
    "Duchi",
    "Packed",
    "PrivUnitG",
    "Randomizer",
    "Shuffled",
    "Summed",
    "Trusted",
    "Untrusted",
    "Wishes",
    "privatise",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
