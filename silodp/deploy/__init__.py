"""PARTIES: silos, server and shuffler as processes of their own, and the bytes between them."""
