"""PARTIES: silos, server and shuffler as processes of their own, the bytes between them, and what a site
decides and keeps for itself: policy, approvals, ledger."""
