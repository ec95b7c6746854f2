"""Trust models. A channel says who adds the noise, and so who has to be trusted."""

from silodp.channels.compressed import CompressedServer
from silodp.channels.gaussian import Channel, Packed, TrustedServer, UntrustedServer, privatise
from silodp.channels.shuffled import BinomialServer, ShuffledServer

__all__ = [
    "BinomialServer",
    "Channel",
    "CompressedServer",
    "Packed",
    "ShuffledServer",
    "TrustedServer",
    "UntrustedServer",
    "privatise",
]
