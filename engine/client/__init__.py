"""Clients of a server, for Python programs and the command line, and a server as a child process."""
