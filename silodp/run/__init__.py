"""Running an algorithm: compiled in one process, or message by message between processes."""
