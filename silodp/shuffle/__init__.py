"""The shuffle model: randomizers, the private sum P_vec, sealed messages, shuffler, audits."""
