"""Plans one after the other in one session: kernel, stage and step of each, its error, and one report."""
