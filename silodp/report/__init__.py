"""PAGES: self-contained HTML for people: what was promised, to whom, what was found, and what is not covered."""
