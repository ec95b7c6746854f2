"""A site's own records, read at the site through the federation's schema. Nothing about them comes from a message."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from silodp.data import SiloData
from silodp.data.frames import read_checked
from silodp.data.schema import Schema
from silodp.deploy.policy import Policy
from silodp.errors import ConfigError
from silodp.facts import Facts


def read_schema(policy: Policy, folder: Path) -> Schema:
    schema = Schema.read(folder / policy.data.schema_file)
    if schema.private:
        raise ConfigError(
            f'schema: {", ".join(schema.private)} has range = "private", which costs budget before a plan; '
            "agree on a public range"
        )
    return schema


def read_records(policy: Policy, folder: Path) -> SiloData:
    schema = read_schema(policy, folder)
    frames = read_checked(schema, [folder / file for file in policy.data.files])
    encoded = schema.encode(pd.concat(frames.values(), ignore_index=True))
    return SiloData(policy.site, encoded.features, encoded.targets)


def own_facts(policy: Policy, folder: Path) -> tuple[Facts, str]:
    """How many records there are and what a record is, and the schema's fingerprint."""
    schema, silo = read_schema(policy, folder), read_records(policy, folder)
    outputs = 1 if schema.target.classes is None else len(schema.target.classes)
    return Facts((len(silo),), (policy.site,), silo.record, outputs, schema.task), schema.fingerprint
