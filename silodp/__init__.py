"""silodp: one model across silos, record-level differential privacy, no trusted server needed."""
