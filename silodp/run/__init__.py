"""SIMULATE: one machine, compiled: runs, sweeps and selections, and the directories they are kept in."""
