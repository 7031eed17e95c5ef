"""Capturing a step of a model as a program that runs again without building a graph."""
