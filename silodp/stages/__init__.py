"""STAGES: other questions about records in the same budget: before training maps of the features, after it metrics."""
