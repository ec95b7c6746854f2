"""What rounding may do to a guarantee: tested with the compiler that users have (see the Makefile)."""
