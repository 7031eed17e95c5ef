"""Parsing of chat models' answers into reasoning, content and tool calls."""
