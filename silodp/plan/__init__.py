"""PROMISE: from a config and public facts to the plan that every party holds, and from what was counted to the
certificate. Nothing here computes on records."""
