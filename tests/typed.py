"""Annotations of sums, prox steps and batches are checked at run time, shapes of arrays too, in every test."""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED = ["silodp.doubles", "silodp.prox", "silodp.sampling"]
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a number where a float is asked for
install_import_hook(CHECKED, "tests.typed.checker")
