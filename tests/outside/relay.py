"""A trust model from outside: an honest relay adds up silos' noised means before the server sees them.

Each silo adds `margin` times the noise that it needs alone. The account states what that gives: nobody has to be
trusted for it, not even the relay.
"""

from typing import ClassVar

import equinox as eqx

from silodp.channels import Untrusted


class Relay(Untrusted):
    name: ClassVar[str] = "relay"
    sees: ClassVar[str] = "the sum of the silos' messages in every round"
    honest: ClassVar = ("the silo itself: its software clips, draws fresh noise and tells nobody",)
    if_others_collude: ClassVar[str] = "unchanged: the silo's noise is its own"

    margin: float = eqx.field(static=True, kw_only=True, default=1.0)  # an option of its own: noise beyond the need

    @classmethod
    def of(cls, wishes):
        return cls(**wishes.own)

    def joint(self, name, needed, declared):
        return self.margin * needed
