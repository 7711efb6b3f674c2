"""A campaign sender that mails each member exactly once, whatever dies, overlaps or repeats."""
