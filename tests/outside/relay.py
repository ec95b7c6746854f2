"""A trust model from outside: an honest relay adds up silos' noised means before the server sees them.

Each silo adds `share` of the noise that it would need alone, so a relay that tells the silos' messages apart sees more
than the server does. The account states what each silo's own noise gives: nobody has to be trusted for it.
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
