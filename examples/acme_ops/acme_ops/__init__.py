"""Operators of Acme for mini-deepinfer."""
