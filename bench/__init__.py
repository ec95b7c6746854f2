"""What silodp costs next to what one would use instead: `make bench`, or `python -m bench --help`."""
