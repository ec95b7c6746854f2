"""The papers' tables and figures, run by the library's own sweeps from the descriptions in its folder `papers`."""

from silodp.reproduce.experiment import Experiment
from silodp.reproduce.files import load_experiment, names

__all__ = ["Experiment", "load_experiment", "names"]
