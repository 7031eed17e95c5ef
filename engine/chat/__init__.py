"""Parsing of chat output into reasoning, content and tool calls."""
