"""Epilogue operators of mini-DeepInfer."""
