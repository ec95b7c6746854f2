"""COST: what releases reveal, and the noise that a target asks for. Knows no config, algorithm, channel or silo."""
