"""From a record's gradient to what it costs, annotations are checked at run time, shapes of arrays too."""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED = [
    *("silodp.doubles", "silodp.prox", "silodp.sampling", "silodp.core", "silodp.releases", "silodp.objective"),
    *("silodp.privacy", "silodp.channels.channel", "silodp.channels.trusted", "silodp.channels.untrusted"),
    *("silodp.channels.compressed", "silodp.server", "silodp.algorithms", "silodp.stages"),
    *(f"silodp.gradients.{name}" for name in ("blocks", "difference", "factors", "general", "structured")),
]
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a number where a float is asked for
install_import_hook(CHECKED, "tests.typed.checker")
