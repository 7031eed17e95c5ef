"""Clients of an Octavo server, and a server in a child process."""
