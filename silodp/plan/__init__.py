"""PROMISE: from a config and public facts to the plan that every party holds, and from what was counted to the
certificate. No promise here rests on records; only `advice` looks at them, to warn whoever holds all of them."""
