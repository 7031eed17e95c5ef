"""Synthetic documents with questions that they answer, for training the demo model and comparing formats.

Standard library only; a seed always gives the same document.
"""
