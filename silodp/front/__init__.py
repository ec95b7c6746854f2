"""FRONT DOOR: what the estimators are made of: raw rows to silos, a fit in memory, predictions, reports, bundles."""
