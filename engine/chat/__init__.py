"""Answers of chat models: where the reasoning ends, what is content, and which tools are called."""
