"""The checker of annotations at run time, of arrays' shapes too: an int is a number where a float is asked for."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
