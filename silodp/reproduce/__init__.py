"""CLAIMS: the papers' tables and figures, run by the library's own sweeps from descriptions in the folder `papers`."""

from silodp.reproduce.experiment import Experiment
from silodp.reproduce.files import load_experiment, names

__all__ = ["Experiment", "load_experiment", "names"]
