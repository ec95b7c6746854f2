"""What a run guarantees: events (what was released), accountants (what it costs), calibration."""
