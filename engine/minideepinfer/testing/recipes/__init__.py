"""Calls of operators, made from recipes: small frozen records whose `repr` is code that makes the same call again."""
