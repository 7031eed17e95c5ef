"""Parsing of chat models' answers, by marks such as <think>, into reasoning, content and tool calls."""
