"""Names of columns that tell whose record it is."""

from __future__ import annotations

import re

# Words that end the name of a column which tells who a record is about.
IDENTIFYING = frozenset(
    ["id", "ids", "uid", "uuid", "guid", "name", "surname", "firstname", "lastname", "forename", "fullname", "username",
     "login", "email", "phone", "telephone", "mobile", "fax", "address", "street", "mrn", "ssn", "passport", "iban",
     "patientid", "personid", "recordid", "caseid", "subjectid", "userid", "customerid", "clientid", "studyid",
     "memberid"]
)  # fmt: skip
ALWAYS = frozenset(["email", "mrn", "ssn", "passport", "iban", "surname"])  # wherever they stand in a name


def identifies(column: str) -> bool:
    """Whether a column is named like one that says whose record it is: id, patient_id, PatientID, e-mail, full name."""
    joined = re.sub(r"[^a-z0-9]", "", column.casefold())
    words = [word.casefold() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", column)]
    return joined in IDENTIFYING or bool(words and (words[-1] in IDENTIFYING or ALWAYS & set(words)))
