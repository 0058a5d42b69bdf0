"""One conformance module per operator family; each has a `Conformance` as FAMILY."""
